"""Tell a user's mistake from a defect of ours."""


class UserError(ValueError):
    """What a user can correct: one line that names the file or option, the value, and what is allowed.

    Commands print it and exit with 2; any other exception is a defect and shown with its traceback. It is a ValueError,
    so that pydantic's validators may raise it.
    """
