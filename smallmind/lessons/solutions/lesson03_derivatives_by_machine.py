"""Solutions of "Derivatives by machine"."""

import math


# %% Exercise 1
def silu(x):
    """A Scalar -> a Scalar."""
    # The sigmoid, by the form whose exponent is not above 0.
    e = math.exp(-abs(x.value))
    s = 1 / (1 + e) if x.value >= 0 else e / (1 + e)
    # The derivative of x s is s + x s', and s' = s (1 - s).
    return Scalar(x.value * s, (x,), (s + x.value * s * (1 - s),))


# %% Exercise 2
class Dual:
    """A value, and how fast it changes with the input."""

    # A pass of this costs as much for each input as one backward pass for all of them. It suits
    # functions of one input and many outputs; a loss has a million inputs and one output.

    def __init__(self, value, slope=0.0):
        self.value, self.slope = value, slope

    def __add__(self, other):
        if not isinstance(other, Dual):
            other = Dual(other)  # a constant has the slope 0
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        if not isinstance(other, Dual):
            other = Dual(other)
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope)

    def exp(self):
        value = math.exp(self.value)
        return Dual(value, value * self.slope)


# %% Exercise 3
def count_numbers(last):
    """A Scalar -> how many Scalars are behind it, with itself."""
    seen, left = {id(last)}, [last]
    while left:
        for parent in left.pop().parents:
            if id(parent) not in seen:
                seen.add(id(parent))
                left.append(parent)
    return len(seen)
