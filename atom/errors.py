"""The errors that reach a person: what was given, what is allowed, and the remedy."""

from __future__ import annotations


class LaunchRefused(ValueError):
    """A launch that must not go on: the configuration cannot work on this machine or with these peers.

    Entry points print the message alone, without a traceback, and exit with :data:`REFUSED_EXIT_STATUS`.
    """


REFUSED_EXIT_STATUS = 2
