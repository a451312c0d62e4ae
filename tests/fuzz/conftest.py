"""How many cases are drawn: a few, always the same, or with `--hypothesis-profile=many` other ones each time."""

from importlib.util import find_spec

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    shared = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("few", max_examples=29, derandomize=True, **shared)  # of each of seven kinds
    settings.register_profile("many", max_examples=2858, **shared)
    settings.load_profile("few")
