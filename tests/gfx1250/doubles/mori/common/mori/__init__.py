"""Double of mori: a communicator that counts its symmetric memory, and dispatch plans that check their sizes."""
