"""The two ways a command ends other than well.

`UserError` is a mistake in what a person gave us (exit code 2): its message is one line that names what is wrong,
where, and the mend. `CheckFailed` is a check that ran and said no (exit code 1).
"""


class UserError(ValueError):
    """A person's input is wrong: one line with what, where and the mend. The CLI exits with code 2."""


class CheckFailed(Exception):
    """A check ran to its end and failed, with the number and its bound. The CLI exits with code 1."""
