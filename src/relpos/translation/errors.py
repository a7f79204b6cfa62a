"""What a user gave and we cannot use; the command line prints it as one line."""


class InputError(Exception):
    """What the user gave cannot be used. The message is one sentence: what, where, and what to do."""


class UsageError(InputError):
    """An option or a recipe is wrong, before any work has begun."""
