"""The longest wait of a test for what must happen.

Only a failure waits so long, so that it is generous: a machine with many other processes is slower by a factor.
A test that waits for what must not happen has a short time of its own.
"""

DEADLINE_S = 120.0
