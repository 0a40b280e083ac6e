from hypothesis import HealthCheck, settings

# Two busy cores: the time of one example says nothing. The same examples each time: a failure is a finding.
settings.register_profile(
    "g2rpo", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("g2rpo")
