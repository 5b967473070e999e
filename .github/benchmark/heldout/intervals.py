"""Closed intervals of numbers, and sets of them that do not overlap."""

import bisect


class Interval:
    """All numbers from start to end, both included."""

    __slots__ = ("start", "end")

    def __init__(self, start, end):
        if start > end:
            raise ValueError("start must not be greater than end")
        self.start = start
        self.end = end

    def __repr__(self):
        return f"{self.__class__.__name__}({self.start!r}, {self.end!r})"

    def __eq__(self, other):
        if not isinstance(other, Interval):
            return NotImplemented
        return self.start == other.start and self.end == other.end

    def __contains__(self, value):
        return self.start <= value <= self.end

    def overlaps(self, other):
        """Return True if the two intervals have a number in common."""
        return self.start <= other.end and other.start <= self.end


def merge(intervals):
    """Return a sorted list in which overlapping intervals are joined."""
    result = []
    for item in sorted(intervals, key=lambda i: i.start):
        if result and result[-1].overlaps(item):
            last = result[-1]
            result[-1] = Interval(last.start, max(last.end, item.end))
        else:
            result.append(item)
    return result


def find(intervals, value):
    """Find the interval of a merged list that contains value, or None."""
    starts = [item.start for item in intervals]
    index = bisect.bisect_right(starts, value) - 1
    if index >= 0 and value in intervals[index]:
        return intervals[index]
    return None
