"""The HTTP scorer: the protocol, the example server, and what is no number."""

import base64
import io
import math
import runpy
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.reward_servers import DROP, HANG, Reply, RewardServer, in_turn, serving

from g2rpo.rewards.registry import load_reward

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).parents[2] / "examples" / "http_reward_server.py"
IMAGES = torch.arange(0, 250, 50)[:, None, None, None].expand(5, 3, 4, 6) / 255


def load(judge, **options):
    urls = [judge.address] if isinstance(judge, RewardServer) else judge
    return load_reward("http", CPU, {"urls": urls, "backoff": 0.02, "timeout": 5.0, **options})


def brightness(request):
    images = (Image.open(io.BytesIO(base64.b64decode(text))) for text in request["images"])
    return [image.getpixel((0, 0))[0] for image in images]


def test_the_example_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), runpy.run_path(str(EXAMPLE))["Handler"])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        reward = load(f"http://127.0.0.1:{server.server_port}/score", batch=2)
        scores = reward(IMAGES, list("abcde"), [{"k": i} for i in range(5)])
    finally:
        server.shutdown()
        server.server_close()
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, IMAGES[:, 0, 0, 0], rtol=0, atol=1e-6)


def test_what_is_asked_and_that_order_is_kept(monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "secret")

    def slow_first(request):
        scores = brightness(request)
        return Reply({"scores": scores}, seconds=0.1 - min(scores) / 2500)

    with serving(slow_first) as judge:
        reward = load(judge, batch=2, concurrency=2, headers={"X-Team": "a"}, api_key_env="SCORER_KEY")
        assert reward(IMAGES, list("abcde"), [{"k": i} for i in range(5)]).tolist() == [0, 50, 100, 150, 200]
        assert reward(IMAGES[:1], ["a"]).tolist() == [0]
        assert judge.address in reward.describe() and "secret" not in reward.describe()
    assert judge.most == 2 and len(judge.requests) == 4
    first, second, third, last = sorted(judge.requests[:3], key=brightness) + judge.requests[3:]
    assert [request["prompts"] for request in (first, second, third)] == [["a", "b"], ["c", "d"], ["e"]]
    assert second["metadata"] == [{"k": 2}, {"k": 3}] and last["metadata"] == [{}]
    assert Image.open(io.BytesIO(base64.b64decode(first["images"][0]))).format == "PNG"
    assert judge.headers[0]["X-Team"] == "a" and judge.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("body", "scores", "reason"),
    [
        ('{"scores": [1, null, 2.5]}', [1, None, 2.5], "1 x the server returned null"),
        ('{"scores": [1, "2", 3]}', [1, None, 3], "1 x a score is not a number"),
        ('{"scores": [true, false, [4]]}', [None, None, None], "3 x a score is not a number"),
        ('{"scores": [NaN, Infinity, -Infinity]}', [None, None, None], "3 x a score is not finite"),
        ('{"scores": [1e39, 1e400, 0]}', [None, None, 0], "2 x a score is not finite"),
        (f'{{"scores": [1{"0" * 400}, -0.5, 0]}}', [None, -0.5, 0], "1 x a score is not finite"),
        ('{"scores": [1, 2]}', [None] * 3, "3 x the answer does not have one score per image"),
        ('{"scores": [1, 2, 3, 4]}', [None] * 3, "not have one score per image"),
        ('{"scores": {"0": 1}}', [None] * 3, 'no list "scores"'),
        ('{"score": [1, 2, 3]}', [None] * 3, 'no list "scores"'),
        ("[1, 2, 3]", [None] * 3, 'no list "scores"'),
        ("null", [None] * 3, 'no list "scores"'),
        ("1, 2, 3", [None] * 3, "the answer is not JSON"),
    ],
)
def test_only_a_number_is_a_score(body, scores, reason, caplog):
    with serving(lambda request: Reply(body)) as judge:
        reward = load(judge)
        for _ in range(2):
            given = reward(IMAGES[:3], list("abc")).tolist()
            assert [None if math.isnan(score) else score for score in given] == scores
        assert reason in reward.last_error
    assert len(judge.requests) == 2 and len(caplog.records) == 1


def test_a_request_that_fails_takes_only_its_own_pictures_along():
    def moody(request):
        return {"a": Reply(status=400), "c": HANG, "e": Reply(status=500)}.get(
            request["prompts"][0], Reply({"scores": [1] * len(request["prompts"])})
        )

    with serving(moody) as judge:
        reward = load(judge, batch=1, retries=1, timeout=0.3)
        assert reward(IMAGES, list("abcde")).isnan().tolist() == [True, False, True, False, True]
        for reason in ("HTTP 400", "HTTP 500", "no answer within 0.3 s"):
            assert f"1 x {judge.address}: {reason}" in reward.last_error
        judge.answer = in_turn(DROP, Reply(status=429), Reply({"scores": [3]}))
        patient = load(judge, retries=2)
        assert patient(IMAGES[:1], ["b"]).tolist() == [3] and patient.last_error is None


def test_a_server_that_is_gone_gives_no_number_at_all(caplog):
    judge = RewardServer(lambda request: Reply({"scores": [1] * len(request["images"])}))
    reward = load(judge, batch=1, retries=1)
    assert not reward(IMAGES, list("abcde")).isnan().any() and reward.last_error is None
    judge.close()
    assert reward(IMAGES, list("abcde")).isnan().all()
    assert f"of 5 samples 5 x {judge.address}: ConnectError" in reward.last_error
    assert len(caplog.records) == 1


def test_metadata_that_json_cannot_carry_is_told():
    with serving(lambda request: Reply({"scores": [1]})) as judge:
        reward = load(judge)
        assert reward(IMAGES[:1], ["a"], [{"when": 3j}]).isnan().all()
        assert "complex is not JSON serializable" in reward.last_error and not judge.requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "needs urls, the addresses"),
        ({"urls": "ftp://a/b"}, "not an http address"),
        ({"urls": "http://a\0b/c"}, "not an http address"),
        ({"urls": ["http://exa mple/b"]}, "not an http address"),
        ({"check": "no"}, "check='no' must be true or false"),
        ({"batch": 0}, "batch=0 must be an integer, at least 1"),
        ({"headers": {"X": 1}}, r"headers\.X is a int, and must be an ASCII string"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
        ({"concurrency": True}, "concurrency = True: true is not a number"),
        ({"api_key_env": "NO_SUCH_KEY"}, "environment variable is not set"),
        ({"check": True}, r"no server at http://127.0.0.1:9/score \(ConnectError.*check = false"),
        ({"url": "http://a"}, "no option 'url'; did you mean 'urls'"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        load_reward("http", CPU, {"urls": ["http://127.0.0.1:9/score"], "check": False, **options})


def test_any_answer_to_a_get_will_do_at_the_start():
    with serving(lambda request: Reply({"scores": [2]})) as judge:
        judge.get = Reply(status=405)
        assert load(judge)(IMAGES[:1], ["a"]).tolist() == [2]
