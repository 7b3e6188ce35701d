"""The parameters of a question. They are texts, which may be anything: what is wrong is refused."""

from common import Refused


def known(asked, *names):
    """Refuse what nobody has asked for."""
    for name in asked:
        if name not in names:
            raise Refused(f"there is no parameter {name!r}; there are {', '.join(names)}")


def whole(asked, name, default, lowest, highest):
    text = asked.get(name, str(default))
    if not (text.isdecimal() and len(text) < 10
            and lowest <= int(text) <= highest):
        raise Refused(f"{name} = {text!r} is no whole number from {lowest} to {highest}")
    return int(text)


def real(asked, name, default, lowest, highest):
    text = asked.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = None
    if value is None or not lowest <= value <= highest:
        raise Refused(f"{name} = {text!r} is no number from {lowest} to {highest}")
    return value


def one_of(asked, name, default, allowed):
    value = asked.get(name, default)
    if value not in allowed:
        raise Refused(f"{name} = {value!r} is none of {', '.join(map(str, allowed))}")
    return value
