import unittest
from decimal import Decimal


class InsufficientFunds(Exception):
    pass


class Ledger:
    def __init__(self):
        self._balances = {}
        self._history = []

    def deposit(self, account, amount):
        amount = Decimal(amount)
        if amount <= 0:
            raise ValueError("amount must be positive")
        self._balances[account] = self.balance(account) + amount
        self._history.append(("deposit", account, amount))

    def transfer(self, source, target, amount):
        amount = Decimal(amount)
        if self.balance(source) < amount:
            raise InsufficientFunds(source)
        self._balances[source] -= amount
        self._balances[target] = self.balance(target) + amount
        self._history.append(("transfer", source, target, amount))

    def balance(self, account):
        return self._balances.get(account, Decimal(0))


class LedgerTest(unittest.TestCase):

    def setUp(self):
        self.ledger = Ledger()
        self.ledger.deposit("alice", "10.00")

    def test_balance(self):
        self.assertEqual(self.ledger.balance("alice"), Decimal("10.00"))
        self.assertEqual(self.ledger.balance("bob"), 0)

    def test_transfer(self):
        self.ledger.transfer("alice", "bob", "2.50")
        self.assertEqual(self.ledger.balance("alice"), Decimal("7.50"))
        self.assertEqual(self.ledger.balance("bob"), Decimal("2.50"))

    def test_transfer_too_much(self):
        with self.assertRaises(InsufficientFunds):
            self.ledger.transfer("alice", "bob", 11)
        self.assertEqual(self.ledger.balance("alice"), 10)

    def test_deposit_invalid(self):
        for amount in 0, -1, "-0.01":
            with self.subTest(amount=amount):
                self.assertRaises(ValueError, self.ledger.deposit, "bob", amount)


if __name__ == "__main__":
    unittest.main()
