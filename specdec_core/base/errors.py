"""The one error that users see: a single line saying what was wrong, where, what would be right."""

from specdec_core.base.uris import without_passwords


class UserError(ValueError):
    """Bad input. The command line prints its text and exits with 2; HTTP answers 4xx. A password
    in a URI is not part of the text."""

    def __init__(self, *text: object) -> None:
        super().__init__(*(without_passwords(str(part)) for part in text))


def os_reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read or written, as the system says it."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return (error.strerror or str(error)).lower()
