"""The one error that users see: a single line saying what was wrong, where, what would be right."""


class UserError(ValueError):
    """Bad input. The command line prints its text and exits with 2; HTTP answers 4xx."""
