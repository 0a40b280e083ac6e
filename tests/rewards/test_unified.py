"""UnifiedReward's client against a server that answers well, badly, late or not at all."""

import asyncio
import base64
import io
import logging
import math
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import torch
from PIL import Image
from support.reward_servers import DROP, HANG, Reply, RewardServer, in_turn, serving

from g2rpo.rewards.registry import load_reward
from g2rpo.rewards.remote.servers import retry_after
from g2rpo.rewards.remote.unified import default_prompt, parse

CPU = torch.device("cpu")
QUICK = {"model": "judge", "backoff": 0.02, "timeout": 5.0}
PORT_OF_NOBODY = "http://127.0.0.1:9/v1"


def chat(text, **about):
    return Reply({"choices": [{"message": {"role": "assistant", "content": text}, **about}]})


def rated(alignment, coherence=3, style=2):
    return chat(
        f"Alignment Score (1-5): {alignment}\nCoherence Score (1-5): {coherence}\nStyle Score (1-5): {style}"
    )


def caption(request):
    (text,) = (part["text"] for part in request["messages"][0]["content"] if part["type"] == "text")
    return text.rpartition("[")[2].rstrip("]")


def load(servers, **options):
    servers = [servers.url] if isinstance(servers, RewardServer) else servers
    return load_reward("unified", CPU, {"servers": servers, **QUICK, **options})


def ask(reward, *prompts):
    return reward(torch.rand(len(prompts), 3, 8, 8), list(prompts)).tolist()


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ("Alignment Score (1-5): 4", 4),
        ("Alignment Score (1-5): 3.75", 3.75),
        ("alignment score: 2", 2),
        ("**Alignment Score (1-5):** 4.5", 4.5),
        ("- Alignment Score (1–5): **4.5**", 4.5),
        ("1. Alignment Score: 4.5/5", 4.5),
        ("Alignment Score: 4 / 5 (good)", 4),
        ("Alignment Score: 4 out of 5", 4),
        ("Alignment Score (1-5): 4,5", 4.5),
        ("Alignment Score (1-5)：5", 5),
        ("Alignment Score: 3.\r", 3),
        ("Alignment Score: 7.5", 5),
        ("Alignment Score: 0", 1),
        ("Alignment Score: -2", 1),
        ("Style Score: 1\nAlignment Score: 2\nCoherence Score: 3", 2),
        ("Alignment Score: 2\nOn reflection:\nAlignment Score: 4", 4),
        ("Alignment Score (1-5): X", None),
        ("Alignment Score (1-5):", None),
        ("Alignment: 4", None),
        ("Alignment Score: 8/10", None),
        ("Alignment Score: 8 out of 10", None),
        ("Alignment Score: 3-4", None),
        ("Alignment Score: 3 to 4", None),
        ("Alignment Score: 4.5.6", None),
        ("Alignment Score: 4/50", None),
        ("Alignment Score: nan", None),
        ("Alignment Score: inf", None),
        ("Alignment Score: 4e0", None),
        ("Alignment Score: four", None),
        ("Semantic Alignment Score: 4", None),
        ("", None),
        ("Alignment Score: 4\nAlignment Score: unclear", None),
        ("Alignment Score:\n4", None),
    ],
)
def test_a_line_is_a_score_or_nothing(line, score):
    assert parse(line, "Alignment") == score


def test_final_score_is_an_axis_too():
    assert parse("Thoughts: 2 objects.\nFinal Score: 3.5", "Final") == 3.5
    assert default_prompt(["Final"]).endswith("Final Score: X\n\nText Caption: [{prompt}]")
    assert "Alignment Score (1-5): X\nStyle Score (1-5): X\n" in default_prompt(["Alignment", "Style"])


def test_what_is_asked(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    images = torch.tensor([[0.0, 0.2, 1.0], [0.6, 0.4, 0.1]])[:, :, None, None].expand(2, 3, 4, 6).clone()
    images[:, 0, 0, 5] = 0.5
    with serving(lambda request: rated(4)) as judge:
        reward = load(judge, api_key_env="JUDGE_KEY", max_tokens=77)
        assert reward(images, ["a {prompt} and a {x}", "b"]).tolist() == [4, 4]
        told = reward.describe()
        assert "secret" not in told and "judge at http://127.0.0.1" in told and "score: Alignment (" in told
        jpeg = load(judge, image_format="jpeg")
        jpeg(images[:1], ["b"])
    assert judge.headers[0]["Authorization"] == "Bearer secret" and "Authorization" not in judge.headers[2]
    first, second, third = sorted(judge.requests[:2], key=caption) + judge.requests[2:]
    assert first["model"] == "judge" and first["temperature"] == 0 and first["max_tokens"] == 77
    assert caption(first) == "a {prompt} and a {x}" and caption(second) == "b"
    for request, image in ((first, images[0]), (second, images[1])):
        head, _, data = request["messages"][0]["content"][0]["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        pixels = torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(data))).tobytes()))
        assert torch.equal(pixels.reshape(4, 6, 3).permute(2, 0, 1), (image * 255).round().long())
    head, _, data = third["messages"][0]["content"][0]["image_url"]["url"].partition(",")
    assert (
        head == "data:image/jpeg;base64" and Image.open(io.BytesIO(base64.b64decode(data))).format == "JPEG"
    )


def test_answers_out_of_order_belong_to_their_pictures_and_few_are_in_flight():
    def slow_first(request):
        number = float(caption(request))
        return Reply(rated(number).body, seconds=0.1 - number / 50)

    with serving(slow_first) as judge:
        reward = load(judge, concurrency=3)
        numbers = [1.0, 4.5, 2.0, 3.25, 1.5, 5.0, 2.75]
        assert ask(reward, *map(str, numbers)) == numbers
    assert judge.most == 3 and len(judge.requests) == 7


def test_the_score_is_an_axis_or_the_mean():
    with serving(lambda request: rated(4.5, 3, 1.5)) as judge:
        assert ask(load(judge), "a") == [4.5]
        assert ask(load(judge, combine="Style"), "a") == [1.5]
        assert ask(load(judge, combine="mean"), "a") == [3]
        assert ask(load(judge, axes=["Coherence", "Style"], combine="mean"), "a") == [2.25]


BAD = {
    "words": chat("I like it."),
    "one axis less": chat("Alignment Score (1-5): 4\nCoherence Score (1-5): 4"),
    "a word for a number": rated("good"),
    "no text": chat(None),
    "no choices": Reply({"choices": []}),
    "a list": Reply([1]),
    "an empty answer": Reply(""),
    "no JSON": Reply("<html>"),
    "brackets": Reply("[" * 100_000),
    "cut off": Reply({"choices": [rated(4).body["choices"][0] | {"finish_reason": "length"}]}),
}


def test_what_cannot_be_read_is_no_number_and_spoils_nothing_else(caplog):
    with serving(lambda request: BAD.get(caption(request)) or rated(2.5)) as judge:
        reward = load(judge)
        for _ in range(2):
            scores = ask(reward, "good", *BAD, "good too")
            assert scores[0] == scores[-1] == 2.5
            assert all(math.isnan(score) for score in scores[1:-1])
        assert len(judge.requests) == 2 * (
            len(BAD) + 2
        )  # an answer that cannot be read is not asked for again
        assert reward.last_error.startswith(
            "of 12 samples 3 x the answer is not a chat completion with text, 3 x"
        )
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len({*lines})  # each reason once
        assert any(
            "no Style score in the answer (Alignment Score (1-5): 4\\nCoherence" in line for line in lines
        )
        assert any("within max_tokens=512" in line for line in lines)
        reward.last_error = None
        assert ask(reward, "good") == [2.5] and reward.last_error is None
    assert reward.reward.tally.counts["no Style score in the answer"] == 2


@pytest.mark.parametrize("first", [Reply(status=429), Reply(status=500), Reply(status=503), DROP])
def test_what_may_pass_is_asked_again(first):
    with serving(in_turn(first, first, rated(3))) as judge:
        assert ask(load(judge), "a") == [3]
    assert len(judge.requests) == 3
    pauses = [after - before for before, after in zip(judge.times, judge.times[1:], strict=False)]
    assert pauses[0] >= 0.01 and pauses[1] >= 0.02  # half of backoff, then doubled


def test_pauses_double():
    with serving(in_turn(*[Reply(status=500)] * 3, rated(3))) as judge:
        assert ask(load(judge, backoff=0.05), "a") == [3]
    # Between half of it and all: 0.05, 0.1, 0.2 s. One that did not double would be over in 0.05.
    assert judge.times[3] - judge.times[2] >= 0.1 and judge.times[2] - judge.times[1] >= 0.05


def test_the_servers_own_pause_is_kept_by_all():
    refused, slow = Reply(status=429, headers={"Retry-After": "0.4"}), replace(rated(3), seconds=0.2)
    with serving(in_turn(refused, slow, rated(3))) as judge:  # the refusal is read before the second answer
        assert ask(load(judge, concurrency=2), "a", "b", "c") == [3, 3, 3]
    # One of the first two is on its way already; the third waits as the refused one does.
    assert len(judge.requests) == 4 and min(judge.times[2:]) - judge.times[0] >= 0.4
    with serving(lambda request: Reply(status=429, headers={"Retry-After": "3600"})) as judge:
        began = time.monotonic()
        reward = load(judge)
        assert math.isnan(ask(reward, "a")[0]) and time.monotonic() - began < 2
    assert "requests a pause of more than 60 s" in reward.last_error


def test_retry_after_is_seconds_or_a_date():
    assert retry_after("7") == 7 and retry_after("-1") == 0 and retry_after(None) is None
    assert retry_after("soon") is None and retry_after("nan") is None
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < retry_after(later) <= 30
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@pytest.mark.parametrize(("status", "requests"), [(400, 1), (401, 1), (404, 1), (500, 3), (429, 3)])
def test_what_stays_wrong_is_no_number(status, requests):
    with serving(lambda request: Reply("what was wrong", status=status)) as judge:
        reward = load(judge, retries=2)
        assert math.isnan(ask(reward, "a")[0])
        assert len(judge.requests) == requests
        assert f"1 x {judge.url}: HTTP {status}" in reward.last_error
        judge.answer = in_turn(Reply(status=500), rated(2))
        assert ask(reward, "b") == [2]  # a server that speaks is not down


def test_a_server_that_hangs():
    with serving(in_turn(HANG, rated(3))) as judge:
        assert ask(load(judge, timeout=0.2), "a") == [3]
    with serving(lambda request: HANG if caption(request) == "bad" else rated(4)) as judge:
        began = time.monotonic()
        reward = load(judge, timeout=0.2, retries=1)
        scores = ask(reward, "a", "bad", "b")
        assert scores[::2] == [4, 4] and math.isnan(scores[1]) and time.monotonic() - began < 2
        assert "no answer within 0.2 s" in reward.last_error


def test_several_servers_share_the_work_and_stand_in_for_each_other():
    with serving(lambda request: rated(3)) as one, serving(lambda request: rated(4)) as other:
        assert sorted(ask(load([one.url, other.url + "/"]), *"abcdef")) == [3, 3, 3, 4, 4, 4]
        for bad in (PORT_OF_NOBODY, None):
            with serving(lambda request: Reply(status=500)) as failing:
                reward = load([bad or failing.url, one.url], check=False, retries=1)
                assert ask(reward, *"abcdef") == [3] * 6 and reward.last_error is None


def test_a_server_that_dies_between_calls_and_comes_back(caplog):
    judge = RewardServer(lambda request: rated(3))
    reward = load(judge, retries=2, concurrency=1, backoff=0.1)
    assert ask(reward, "a") == [3]
    judge.close()
    began = time.monotonic()
    assert all(math.isnan(score) for score in ask(reward, *"abcdefghij"))
    # The first waits for it (0.05 to 0.1 and twice that), the others know.
    assert 0.15 < time.monotonic() - began < 1.0
    assert "of 10 samples 10 x" in reward.last_error and "ConnectError" in reward.last_error
    assert len(caplog.records) == 1
    with serving(lambda request: rated(2), port=judge.port) as again:
        assert ask(reward, *"ab") == [2, 2]
        again.answer = in_turn(Reply(status=500), Reply(status=500), rated(2))
        assert ask(reward, "a") == [2]  # patient again


def test_a_callers_running_loop_is_not_in_the_way():
    async def notebook():
        return ask(reward, "a", "b")

    with serving(lambda request: rated(3)) as judge:
        reward = load(judge)
        assert asyncio.run(notebook()) == [3, 3]


def test_ctrl_c_ends_the_waiting():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    threads = threading.active_count()
    try:
        with serving(lambda request: HANG) as judge:
            reward = load(judge, timeout=60)
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                ask(reward, "a", "b")
            assert time.monotonic() - began < 2
            timer.join()
            judge.answer = lambda request: rated(3)
            assert ask(reward, "a") == [3]
    finally:
        signal.signal(signal.SIGUSR1, before)
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": []}, r"needs servers, .* servers = \[\"http://localhost:8000/v1\"\].*docs/rewards.md"),
        ({"servers": "localhost:8000"}, "'localhost:8000', which is not an http address"),
        ({"servers": ["http://a:x/v1"]}, "not an http address"),
        ({"servers": ["http://me:secret@a/v1"]}, "contains a password.*api_key_env"),
        ({"servers": ["http://a/v1", "http://a/v1/"]}, "more than once"),
        ({"model": ""}, "model='' must name the model"),
        ({"axes": []}, "axes=.* must be a list"),
        ({"axes": ["Style", "Style"]}, "different names"),
        ({"axes": ["Allignment"]}, "no axis 'Allignment'; did you mean 'Alignment'.*prompt_file"),
        ({"combine": "median"}, "neither 'mean' nor one of the axes Alignment, Coherence, Style"),
        ({"image_format": "webp"}, "'png' or 'jpeg'"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer, at least 1"),
        ({"timeout": "60"}, "timeout='60' must be a number of seconds above 0"),
        ({"concurrency": 2.5}, "concurrency=2.5 must be an integer"),
        ({"retries": -1}, "retries=-1"),
        ({"backoff": math.inf}, "backoff=inf"),
        ({"api_key_env": "NO_SUCH_KEY"}, "environment variable is not set; export NO_SUCH_KEY"),
        ({"prompt_file": "no/such.txt"}, "prompt_file='no/such.txt' cannot be read"),
        ({"sorvers": []}, "no option 'sorvers'; did you mean 'servers'"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        load_reward("unified", CPU, {"servers": [PORT_OF_NOBODY], "check": False, **QUICK, **options})


def test_a_server_is_looked_for_before_the_run():
    with serving(lambda request: rated(3)) as judge:
        with pytest.raises(ValueError, match=f"no server at {PORT_OF_NOBODY} .*vllm serve judge --port 9"):
            load([judge.url, PORT_OF_NOBODY])
        with pytest.raises(ValueError, match="serves judge, not model='jugde'; did you mean 'judge'"):
            load(judge, model="jugde")
        judge.get = Reply(status=404)
        with pytest.raises(ValueError, match=r"HTTP 404 and no list of models.*ends in /v1"):
            load(judge)
        judge.get = Reply(status=401)
        with pytest.raises(ValueError, match=r"requires a key \(HTTP 401.*api_key_env"):
            load(judge)
        assert not judge.requests


def test_a_prompt_of_ones_own(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text('Rate {"json"} [{prompt}]\n')
    with serving(lambda request: chat("Beauty Score: 4")) as judge:
        reward = load(judge, prompt_file=str(file), axes=["Beauty"])
        assert ask(reward, "a cat") == [4]
        assert judge.requests[0]["messages"][0]["content"][1]["text"] == 'Rate {"json"} [a cat]\n'
        before = reward.describe()
        file.write_text("Rate [{prompt}]")
        after = load(judge, prompt_file=str(file), axes=["Beauty"]).describe()
        assert before != after and before.split("sha256")[0] == after.split("sha256")[0]
        file.write_text("Rate it")
        with pytest.raises(ValueError, match=r"must contain \{prompt\}"):
            load(judge, prompt_file=str(file), axes=["Beauty"])


def test_nothing_is_said_of_a_picture_by_default(caplog):
    with caplog.at_level(logging.WARNING), serving(lambda request: rated(3)) as judge:
        ask(load(judge), "a", "b")
    assert not caplog.records
