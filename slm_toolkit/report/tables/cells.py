"""Values as the text of a table's cell; an unknown value is a dash."""

DASH = "-"


def setting(value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def rate(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{share:.0%}"


def gib(num_bytes: int | None) -> str:
    return DASH if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def milliseconds(seconds: float | None) -> str:
    return DASH if seconds is None else f"{seconds * 1e3:,.1f}"


def dollars(usd: float | None) -> str:
    return DASH if usd is None else f"${usd:.4f}"


def loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"
