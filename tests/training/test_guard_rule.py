"""The rule of the guard, on made-up scores: it fires on runs that fail and not on noise."""

from types import MappingProxyType

import numpy as np
import pytest

from g2rpo.training.falls import Evaluation
from g2rpo.training.guard_rule import (
    BLOCK,
    COLLAPSE,
    HACKING,
    confirmations,
    drift_findings,
    fall_scores,
    image_findings,
    pending_best,
    reward_drifts,
    reward_findings,
    rollout_findings,
)

IMAGES = 512


def run(seed, trained, untrained, images=IMAGES, noise=0.01):
    """Evaluations whose means follow two curves; images differ, and differences of a pair are noisy."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0.7, 0.1, (2, images))
    made = []
    for number, gains in enumerate(zip(trained, untrained, strict=True)):
        spread = noise * np.sqrt(min(number, 4))  # images move apart from those of step 0, as in real runs
        rows = [b + gain + rng.normal(0, spread, images) for b, gain in zip(base, gains, strict=True)]
        made.append(Evaluation(10 * number, {"trained": rows[0], "held_out": rows[1]}))
    return made


def first_finding(evaluations, weights=MappingProxyType({"trained": 1.0}), untrained=("held_out",)):
    for end in range(1, len(evaluations) + 1):
        if found := reward_findings(evaluations[:end], weights, list(untrained)):
            return end - 1, found
    return None, []


RISING = [0.002 * i for i in range(12)]
PLATEAU = [0.0, 0.004, 0.008, 0.01, *[0.011] * 8]
HACKED = [0.0, 0.006, 0.012, 0.016, 0.018, 0.0165, 0.0145, 0.0125, 0.01, 0.0, -0.02, -0.03]


def test_healthy_runs_are_left_alone():
    fired = [first_finding(run(seed, RISING, PLATEAU))[0] for seed in range(100)]
    assert sum(end is not None for end in fired) <= 1


def test_hacking_is_found_before_half_of_the_gain_is_lost():
    for seed in range(10):
        end, found = first_finding(run(seed, RISING, HACKED))
        assert end is not None and HACKED[end] > 0.5 * max(HACKED), seed
        assert [finding.kind for finding in found] == [HACKING]
        (finding,) = found
        assert finding.metric == "held_out" and finding.best_step in (30, 40)
        assert "may exploit its reward: held_out fell since iteration" in finding.message
        assert "trained +" in finding.message and finding.details["images"] == IMAGES
        assert finding.details["change"] < 0 < finding.details["gain_before"]


def test_a_collapse_is_told_from_hacking():
    end, found = first_finding(run(0, HACKED, HACKED))
    assert end is not None and {finding.kind for finding in found} == {COLLAPSE}
    end, found = first_finding(run(0, HACKED, RISING))
    assert [(finding.kind, finding.metric) for finding in found] == [(COLLAPSE, "trained")]


def test_a_fall_from_the_start_names_no_iteration():
    end, found = first_finding(run(0, [0, -0.1, -0.2], [0, -0.1, -0.2]))
    assert end == 1 and all("since before training" in finding.message for finding in found)


def test_one_weak_fall_needs_another():
    """A fall of three standard errors at one evaluation, and of none at the next."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, IMAGES)
    noise = rng.normal(0, 0.1, IMAGES)
    noise -= noise.mean()
    weak = base + noise - 3.2 * noise.std(ddof=1) / np.sqrt(IMAGES)

    def falls(*values):
        made = [Evaluation(i, {"t": np.zeros(IMAGES) + i, "u": v}) for i, v in enumerate(values)]
        return first_finding(made, {"t": 1.0}, ["u"])[0]

    assert falls(base, weak) is None
    assert falls(base, weak, base) is None
    assert falls(base, weak, weak) == 2
    assert falls(base, base + 2 * (weak - base), weak) == 1 or falls(base, base - 1.0) == 1
    assert pending_best([Evaluation(0, {"u": base}), Evaluation(5, {"u": weak})], {}, ["u"]) == 0
    assert pending_best([Evaluation(0, {"u": base}), Evaluation(5, {"u": base})], {}, ["u"]) is None


def test_a_small_part_of_the_gain_may_be_lost():
    base = np.zeros(IMAGES)
    base[::2] = 1e-3  # almost no error, so that every change is significant
    values = [base, base + 1.0, base[::-1] + 0.9, base + 0.9, base[::-1] + 0.75]
    made = [Evaluation(i, {"u": v}) for i, v in enumerate(values)]
    assert first_finding(made[:4], {}, ["u"])[0] is None
    assert first_finding(made, {}, ["u"])[0] == 4


def test_negative_weights_lower_a_reward():
    falling = [-gain for gain in RISING]
    assert first_finding(run(1, falling, PLATEAU), {"trained": -1.0})[0] is None
    _, found = first_finding(run(1, falling, HACKED), {"trained": -1.0})
    assert [finding.kind for finding in found] == [HACKING]


@pytest.mark.parametrize("images", [4, 15])
def test_few_images_decide_nothing(images):
    assert first_finding(run(0, RISING, [0, -1, -2, -3, -4, *[-5] * 7], images))[0] is None


def test_images_without_a_score_are_left_out():
    made = run(3, RISING, HACKED)
    rng = np.random.default_rng(0)
    for evaluation in made:
        evaluation.scores["held_out"][rng.permutation(IMAGES)[:80]] = np.nan
    assert first_finding(made)[0] is not None
    for evaluation in made:
        evaluation.scores["held_out"][:] = np.nan
    assert first_finding(made)[0] is None
    assert set(fall_scores(made, {"trained": 1.0}, ["held_out"])) == {"trained"}


def test_images_are_compared_with_those_before_training():
    def findings(*means):
        names = ("grid", "sharpness", "saturation")
        made = [
            Evaluation(i, {}, {n: np.full(8, v) for n, v in zip(names, m, strict=True)})
            for i, m in enumerate(means)
        ]
        return [(f.kind, f.metric) for f in image_findings(made)]

    healthy, wrong = (0.006, 0.07, 0.05), (0.05, 0.03, 0.4)
    assert findings(healthy, wrong) == findings(healthy, healthy, wrong) == []
    assert findings(healthy, wrong, healthy) == []
    assert findings(healthy, wrong, wrong) == [
        ("grid", "grid"),
        ("blur", "sharpness"),
        ("saturation", "saturation"),
    ]
    assert findings(healthy, (0.011, 0.1, 0.1), (0.013, 0.05, 0.15)) == []
    assert image_findings([Evaluation(i, {}) for i in range(4)]) == []  # records of before the guard


def lines(rewards, spread=None, latents=None):
    return [
        {
            "step": i + 1,
            "reward/r": value,
            "guard/group_spread": 1.0 if spread is None else spread[i],
            "guard/latent_rms": 0.9 if latents is None else latents[i],
        }
        for i, value in enumerate(rewards)
    ]


def test_without_evaluations_the_rollouts_are_compared():
    rng = np.random.default_rng(0)
    rising = np.linspace(0.5, 0.6, 60) + rng.normal(0, 0.01, 60)
    falling = np.concatenate([rising[:30], np.linspace(0.55, 0.3, 30)])

    def kinds(rewards, evaluated=False, **more):
        return [f.kind for f in rollout_findings(lines(rewards, **more), {"r": 1.0}, evaluated)]

    assert kinds(rising) == [] and kinds(falling) == [COLLAPSE] and kinds(falling, evaluated=True) == []
    assert kinds(falling[: 2 * BLOCK]) == []
    narrow = np.linspace(1, 0.02, 60)
    assert kinds(rising, spread=narrow) == ["diversity"]
    assert kinds(rising, latents=np.linspace(0.9, 3, 60)) == ["latents"]
    old = [{"step": i, "reward/r": 1.0} for i in range(60)]
    assert rollout_findings(old, {"r": 1.0}, False) == []


def test_noise_in_rollouts_is_no_collapse():
    fired = 0
    for seed in range(50):
        rewards = 0.5 + np.random.default_rng(seed).normal(0, 0.05, 200)
        given = lines(rewards)
        fired += any(rollout_findings(given[:end], {"r": 1.0}, False) for end in range(BLOCK, 201, BLOCK))
    assert fired <= 1


def exact(size, steps):
    """Evaluations that differ from the first, and from each other, by exactly so many standard errors."""
    noise = np.random.default_rng(size).normal(0, 1, IMAGES)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    return [np.zeros(IMAGES)] + [noise + step / np.sqrt(IMAGES) for step in steps]


def findings_of(trained, untrained):
    pairs = zip(exact(1, trained), exact(2, untrained), strict=True)
    made = [Evaluation(i, {"t": t, "u": u}) for i, (t, u) in enumerate(pairs)]
    end, found = first_finding(made, {"t": 1.0}, ["u"])
    return end, [(finding.kind, finding.metric) for finding in found]


@pytest.mark.parametrize(
    ("falls", "end"),
    [
        ((-6.1,), 2),
        ((-5.9,), None),
        ((-2.6, -2.6), 3),
        ((-2.6, -2.4), None),
        ((-2.1, -2.1, -2.1), 4),
        ((-2.1, -2.1, -1.9), None),
    ],
)
def test_a_smaller_fall_of_an_untrained_metric_takes_more_evaluations(falls, end):
    untrained = [8.0, *(8 + fall for fall in falls)]
    found = findings_of([8.0 + i for i in range(len(untrained))], untrained)
    assert found == ((end, [(HACKING, "u")]) if end else (None, []))


@pytest.mark.parametrize(
    ("falls", "end"), [((-3.1,), 2), ((-2.9,), None), ((-2.1, -2.1), 3), ((-2.1, -1.9), None)]
)
def test_the_trained_rewards_together_need_less(falls, end):
    trained = [8.0, *(8 + fall for fall in falls)]
    found = findings_of(trained, [8.0 + i for i in range(len(trained))])
    assert found == ((end, [(COLLAPSE, "t")]) if end else (None, []))


def test_what_was_not_gained_cannot_be_lost():
    """A best evaluation of 1.9 standard errors is chance, and the fall counts from before training."""
    risen = [8.0, 9.0, 10.0, 11.0]
    assert findings_of(risen, [1.9, -1.0, -1.0, -1.0]) == (None, [])
    assert findings_of(risen, [2.1, -1.0, -1.0, -1.0]) == (3, [(HACKING, "u")])
    assert findings_of(risen, [1.9, -2.6, -2.6, -2.6]) == (3, [(HACKING, "u")])


def test_with_trained_rewards_that_neither_rise_nor_fall_the_fall_must_be_clear():
    assert findings_of([8.0, 7.0, 7.0, 7.0], [8.0, 5.2, 5.2, 5.2]) == (None, [])
    assert findings_of([8.0, 7.0, 7.0, 7.0], [8.0, 5.2, 5.2, 1.9]) == (4, [(COLLAPSE, "u")])
    assert findings_of([8.0, 6.4, 6.4, 6.4], [8.0, 5.2, 5.2, 5.2]) == (3, [(COLLAPSE, "u")])


def test_the_margin_says_how_far_a_warning_is():
    trained, untrained = exact(1, [8.0, 9.0, 10.0]), exact(2, [8.0, 6.3, 6.0])
    pairs = zip(trained, untrained, strict=True)
    made = [Evaluation(i, {"t": t, "u": u}) for i, (t, u) in enumerate(pairs)]
    found = confirmations(made, {"t": 1.0}, ["u"])
    assert list(found) == ["trained", "u"] and found["trained"][1] == -np.inf
    fall, beyond = found["u"]
    assert fall.best_step == 1 and fall.change.z == pytest.approx(-2.0)
    assert beyond == pytest.approx(-0.8)  # 1.7 and 2.0 in a row, of 2.5


def rescored(changes, noise=0.0, images=16, spread=0.1):
    """Evaluations whose trained reward gives the images from before training shifted scores."""
    rng = np.random.default_rng(0)
    first = rng.normal(0.7, spread, images)
    made = []
    for number, change in enumerate([0.0, *changes]):
        scores = {"trained": first + change + rng.normal(0, noise, images)}
        again = {"trained": first + rng.normal(0, noise, images)} if number == 0 else {}
        made.append(Evaluation(10 * number, {}, {}, scores, again))
    return made


@pytest.mark.parametrize(
    ("changes", "noise", "found"),
    [
        ([0.0, 0.0], 0.0, False),
        ([0.003, 0.003], 0.0, False),  # less than a twentieth of the spread
        ([0.006, 0.006], 0.0, True),
        ([0.03, 0.03], 0.0, True),
        ([0.03, 0.0], 0.0, False),  # the present evaluation decides
        ([0.0, 0.03], 0.0, False),  # and must not be alone
        ([0.03, 0.03], 0.03, False),  # within the noise of the reward
        ([0.3, 0.3], 0.03, True),
        ([np.nan, np.nan], 0.0, False),
    ],
)
def test_a_reward_has_drifted_if_its_noise_does_not_explain_it(changes, noise, found):
    findings = drift_findings(rescored(changes, noise))
    assert [(f.kind, f.metric) for f in findings] == [("reward_drift", "trained")] * found


def test_a_drift_needs_scores_that_differ_and_enough_of_them():
    assert reward_drifts(rescored([0.05])).keys() == {"trained"}
    assert reward_drifts(rescored([0.05], images=7)) == {}
    assert reward_drifts(rescored([0.05], spread=0.0)) == {}
    assert reward_drifts(rescored([0.05])[:1]) == {} == reward_drifts([])
    earlier = [Evaluation(0, {}), rescored([0.05])[1]]  # a run of an earlier version
    assert reward_drifts(earlier) == {}
