"""A queue that hands out tickets and lets waiting threads give up."""

import threading
import collections
from time import monotonic as time


class Closed(Exception):
    """Raised when an operation is tried on a closed queue."""


class TicketQueue:
    """Items come out in the order in which they were put in."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self._items = collections.deque()
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._next_ticket = 0
        self._closed = False

    def __len__(self):
        with self._lock:
            return len(self._items)

    def put(self, item):
        """Append an item and return its ticket number."""
        with self._lock:
            if self._closed:
                raise Closed("the queue is closed")
            if self.maxsize > 0 and len(self._items) >= self.maxsize:
                raise OverflowError("the queue is full")
            ticket = self._next_ticket
            self._next_ticket += 1
            self._items.append((ticket, item))
            self._not_empty.notify()
            return ticket

    def get(self, timeout=None):
        """Remove and return the oldest (ticket, item) pair.

        If timeout is a number, wait at most that many seconds and
        raise TimeoutError if nothing was available.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        with self._not_empty:
            endtime = None if timeout is None else time() + timeout
            while not self._items:
                if self._closed:
                    raise Closed("the queue is closed")
                remaining = None
                if endtime is not None:
                    remaining = endtime - time()
                    if remaining <= 0.0:
                        raise TimeoutError("no item was available")
                self._not_empty.wait(remaining)
            return self._items.popleft()

    def close(self):
        """Wake up all waiting threads; no further items are accepted."""
        with self._lock:
            self._closed = True
            self._not_empty.notify_all()
