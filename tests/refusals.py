"""How wrong input is refused: in one sentence, which names what is wrong."""

import pytest


def refused(name: str, call, /, *given, error: type[Exception] = ValueError, **more) -> Exception:
    """What `call(*given, **more)` raises. name : a pattern that must be in it."""
    with pytest.raises(error, match=name) as caught:
        call(*given, **more)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 1000
    return caught.value
