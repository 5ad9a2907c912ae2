"""Which release of lamella this is."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """``source`` where it runs from a checkout and is not installed."""
    try:
        return version("lamella")
    except PackageNotFoundError:
        return "source"
