"""``serve``: the protocol, servers that start, die and are ended, rounds, and results; beside a fake server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from refusals import refusal
from results_builder import label_in, prose_in

from moe_ep_bench.analysis.cases import cases, comparisons
from moe_ep_bench.analysis.compare import compare_directories
from moe_ep_bench.analysis.drawing import draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.served import agreement, first_difference, request_times
from moe_ep_bench.analysis.store import load
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.cli import main
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.files import read_json
from moe_ep_bench.quality.tasks import task_manager
from moe_ep_bench.serving import POLICY, RECORD, server
from moe_ep_bench.serving.client import Answer, Client
from moe_ep_bench.serving.config import PromptsConfig
from moe_ep_bench.serving.prompts import random_prompts, read_prompts
from moe_ep_bench.serving.server import Running, Server, ServerError

TESTS = Path(__file__).parent
FAKE = shlex.join([sys.executable, str(TESTS / "fake_server.py"), "{port}"]).replace("'{port}'", "{port}")
DROP = {"name": "token_drop", "capacity_factor": 1.0}
CONFIG: dict[str, Any] = {
    "serve": {
        "model": "/models/tiny",
        "servers": "together",
        "rounds": 10,
        "requests": 3,
        "alone": 2,
        "concurrency": 3,
        "start_s": 60,
        "request_s": 30,
    },
    "prompts": {"num_words": 4, "max_tokens": 5},
    "policies": [{"name": "topk"}, DROP],
}


def config_in(folder: Path, options: str = "", policies: list[Any] | None = None, **changes: Any) -> Path:
    """A config whose servers are fake ones with these options; they note in ``log`` what happens to them."""
    command = f"{FAKE} --log {folder / 'log'} {options}"
    content = {**CONFIG, "serve": {**CONFIG["serve"], "command": command, **changes}}
    content |= {} if policies is None else {"policies": policies}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    return folder / "mine.yaml"


def serve(config: Path, *more: str) -> int:
    return main(["serve", str(config), "--out", str(config.parent / "out"), *more])


def rows_in(folder: Path) -> dict[str, pd.DataFrame]:
    """Rows of every case by its label."""
    named = json.loads((folder / "out" / "run.json").read_text())["cases"]
    rows = pd.concat(pq.read_table(part).to_pandas() for part in sorted((folder / "out" / "requests").iterdir()))
    in_order = sorted(named.items(), key=lambda item: item[1]["order"])
    return {label_in(case): rows[rows["case_id"] == case_id] for case_id, case in in_order}


def noted(folder: Path, what: str) -> list[list[str]]:
    """Words of the lines that servers noted, of one kind."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [line.split(maxsplit=3) for line in lines if line.startswith(f"{what} ")]


def left_of(folder: Path) -> list[int]:
    """Processes of servers, and of their children, that are still there."""
    pids = [int(words[1]) for what in ("start", "child") for words in noted(folder, what)]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def fake(folder: Path, options: str = "") -> Iterator[Server]:
    one = Server(f"{FAKE} {options}", "/models/tiny", os.environ, folder / "server.log", 60)
    one.start()
    try:
        yield one
    finally:
        one.stop()


def asked(url: str, prompts: list[Any], max_tokens: int = 4, limit_s: float = 30, **load: Any) -> list[Answer]:
    client = Client(url, "served-name", limit_s, max_tokens=max_tokens, logprobs=1)
    try:
        return client.send(prompts, **(load or {"concurrency": 1}))
    finally:
        client.close()


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_the_first_token_is_clocked_from_sending_and_a_piece_without_one_does_not_count(tmp_path: Path) -> None:
    with fake(tmp_path, "--first-ms 150 --token-ms 20") as one:
        (answer,) = asked(one.url, ["a b c"])
    assert 150e3 <= answer.first_us < 1e6
    assert answer.time_us >= 150e3 + 3 * 20e3
    assert answer.time_us > answer.first_us
    assert (answer.num_prompt_tokens, answer.num_tokens) == (3, 4)
    assert answer.text == " 5 6 7 8"
    assert answer.tokens == [" 5", " 6", " 7", " 8"]
    assert answer.logprobs == [-0.5] * 4


def test_a_chat_is_asked_and_read_as_a_prompt_is(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "a b c"}]
    with fake(tmp_path, f"--log {tmp_path / 'log'}") as one:
        of_chat, of_text = asked(one.url, [chat, "a b c"])
    assert (of_chat.failure, of_text.failure) == (None, None)
    for name in ("text", "tokens", "logprobs", "num_tokens", "num_prompt_tokens"):
        assert getattr(of_chat, name) == getattr(of_text, name)
    bodies = [json.loads(words[3]) for words in noted(tmp_path, "request")]
    assert (bodies[0]["messages"], bodies[0]["logprobs"]) == (chat, True)
    assert "prompt" not in bodies[0]


def test_a_server_that_counts_nothing_is_counted_by_pieces(tmp_path: Path) -> None:
    with fake(tmp_path, "--bare") as one:
        (answer,) = asked(one.url, ["a"])
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.tokens, answer.failure) == (4, None, [], None)


def test_pieces_that_come_at_once_are_one_arrival(tmp_path: Path) -> None:
    found = {}
    for bunch in (1, 4):
        with fake(tmp_path, f"--token-ms 100 --bunch {bunch}") as one:
            (found[bunch],) = asked(one.url, ["a"], max_tokens=8)
    assert found[1].text == found[4].text
    # 2 and 8 but for what a busy machine does.
    assert 2 <= found[4].num_arrivals <= 4 < found[1].num_arrivals


def test_as_many_requests_are_in_flight_as_asked_and_answers_keep_their_order(tmp_path: Path) -> None:
    with fake(tmp_path, "--first-ms 100 --token-ms 0") as one:
        answers = asked(one.url, ["x" * size for size in range(1, 7)], concurrency=2)
    assert [answer.text.split()[0] for answer in answers] == list("123456")
    begin = np.array([answer.sent_us for answer in answers])
    end = begin + [answer.time_us for answer in answers]
    in_flight = [int(((begin <= at) & (at < end)).sum()) for at in begin]
    assert max(in_flight) == 2
    assert max(end) >= 3 * 100e3


def test_arrivals_at_a_rate_are_those_of_the_seed_and_wait_for_no_answer(tmp_path: Path) -> None:
    with fake(tmp_path, "--first-ms 300") as one:
        answers = asked(one.url, ["x"] * 5, rate=50.0, seed=7)
    gaps_s = np.random.default_rng(7).exponential(1 / 50, 4)
    sent_s = np.array([answer.sent_us for answer in answers]) / 1e6
    assert (sent_s[1:] >= gaps_s.cumsum() - 1e-3).all()
    assert sent_s[-1] < 0.3, "all are sent before the first is answered"


@pytest.mark.parametrize(
    ("options", "limit_s", "expected"),
    [
        ("--refuses", 30, "HTTP 400: "),
        ("--breaks-off", 30, "RemoteProtocolError"),
        ("--first-ms 5000", 0.2, "no answer within 0.2 s (serve.request_s)"),
    ],
    ids=["refused", "broken off", "too late"],
)
def test_a_request_without_an_answer_says_why(tmp_path: Path, options: str, limit_s: float, expected: str) -> None:
    with fake(tmp_path, options) as one:
        (answer,) = asked(one.url, ["a"], limit_s=limit_s)
    assert answer.failure.startswith(expected)


def said_of(text: Any = " a", **logprobs: Any) -> dict[str, Any]:
    """What a server shall say of each token."""
    return {"choice": {"text": text, "logprobs": {"tokens": [" a"], "token_logprobs": [-1.0], **logprobs}}}


@pytest.fixture(scope="module")
def obliging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that says what prompts want."""
    with fake(tmp_path_factory.mktemp("obliging")) as one:
        yield one


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"tokens": "4"}, "usage: completion_tokens: expected a count of tokens, got '4'"),
        ({"tokens": -4}, "usage: completion_tokens: expected a count of tokens, got -4"),
        ({"tokens": 4.5}, "usage: completion_tokens: expected a count of tokens, got 4.5"),
        ({"tokens": 10**30}, "usage: completion_tokens: expected a count of tokens, got 1000"),
        ({"tokens": True}, "usage: completion_tokens: expected a count of tokens, got true"),
        ({"end": {"usage": {"prompt_tokens": [1]}}}, "usage: prompt_tokens: expected a count of tokens, got [1]"),
        ({"tokens": 1}, "usage: completion_tokens: expected 4 at least, as many came, got 1"),
        (said_of(tokens=[7]), "expected tokens as texts, got 7"),
        (said_of(token_logprobs=["x"]), "expected log-probabilities as numbers, got 'x'"),
        (said_of(token_logprobs=[10**400]), "OverflowError: "),
        (said_of(text="\ud83d"), "UnicodeEncodeError: "),
        (said_of(tokens=["\ud83d"]), "UnicodeEncodeError: "),
        (said_of(text=5), "TypeError: "),
        ({"data": "[", "times": 200_000}, "RecursionError: "),
        ({"data": "[]"}, "AttributeError: "),
        ({"data": " ", "times": 2**25}, "a line of more than 16,777,216 bytes"),
    ],
)
def test_a_field_of_another_kind_is_a_reason(obliging: Server, wanted: dict[str, Any], expected: str) -> None:
    (answer,) = asked(obliging.url, [json.dumps(wanted)])
    assert answer.failure is not None
    assert answer.failure.startswith(expected)


def test_whatever_splits_lines_elsewhere_may_stand_in_an_answer(obliging: Server) -> None:
    text = " a\u2028\x85\u2029b"
    (answer,) = asked(obliging.url, [json.dumps(said_of(text, tokens=[text]))])
    assert (answer.failure, answer.text, answer.tokens) == (None, 4 * text, 4 * [text])


@pytest.mark.parametrize("wanted", [{"end": {"choices": None}}, {"tokens": None}, said_of(token_logprobs=[-np.inf])])
def test_what_is_null_or_infinite_is_not_said(obliging: Server, wanted: dict[str, Any]) -> None:
    (answer,) = asked(obliging.url, [json.dumps(wanted)])
    assert (answer.failure, answer.num_tokens) == (None, 4)
    assert answer.logprobs in ([-0.5] * 4, [None] * 4)


def test_a_key_is_sent_and_written_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    log = tmp_path / "server-log"
    with fake(tmp_path, f"--refuses --log {log}") as one:
        assert serve(config_in(tmp_path), "--url", one.url) == CASES_FAILED
        assert "models Bearer s3cret" in log.read_text()
    said = capsys.readouterr()
    assert "prompt too long" in said.err
    assert "Bearer" in said.err, "the server says it again"
    assert "\x1b" not in said.out + said.err
    assert "s3cret" not in said.out + said.err
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path
    rows = rows_in(tmp_path)["native"]
    assert "s3cret" not in rows["reason"].iloc[0]


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_port_that_another_takes_in_between_is_given_up_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake(tmp_path) as other:  # which would answer in its place
        free = server.free_port()
        ports = iter([other.port, free])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        with fake(tmp_path) as one:
            assert one.port == free
            assert one.process.pid != other.process.pid


def test_a_port_that_is_always_taken_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(server, "free_port", lambda: other.getsockname()[1])
        one = Server(FAKE, "m", os.environ, tmp_path / "log", 60)
        with pytest.raises(ServerError, match=r"the server ended with status 1: .*[Aa]ddress already in use"):
            one.start()


def test_nothing_is_left_of_a_server_not_even_a_child_that_ignores_signals(tmp_path: Path) -> None:
    with fake(tmp_path, f"--child --log {tmp_path / 'log'}"):
        assert len(left_of(tmp_path)) == 2
    assert left_of(tmp_path) == []


def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot start no-such-program: No such file"):
        Server("no-such-program {port}", "m", os.environ, tmp_path / "log", 60).start()


def test_an_older_start_s_refusal_is_none_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "server.refusal").write_text("of an older start")
    with pytest.raises(ServerError, match="the server ended with status 3: what it printed"):
        Server("sh -c 'echo what it printed; exit 3'", "m", os.environ, tmp_path / "server.log", 60).start()


@pytest.mark.slow
def test_sigterm_ends_the_command_and_all_servers(tmp_path: Path) -> None:
    config = config_in(tmp_path, "--child --first-ms 500")
    command = [sys.executable, "-m", "moe_ep_bench", "serve", str(config), "--out", str(tmp_path / "out")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while len(noted(tmp_path, "request")) < 14 and time.monotonic() < deadline:
            assert child.poll() is None, child.stdout.read().decode()
            time.sleep(0.05)
        assert len(left_of(tmp_path)) == 8
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=60)[0].decode()
    finally:
        child.kill()
    assert child.returncode == 128 + signal.SIGTERM
    assert "stopped: what is finished is kept" in said
    assert "Traceback" not in said
    assert left_of(tmp_path) == []
    assert not list((tmp_path / "out").glob("requests/*")), "a start is written as a whole"


@pytest.mark.slow
def test_a_second_interrupt_leaves_no_server_that_ignores_sigterm(tmp_path: Path) -> None:
    config = config_in(tmp_path, "--ignores-sigterm --first-ms 500", policies=[])
    code = (
        "import sys; from moe_ep_bench.serving import server; server._GRACE_S = 5; from moe_ep_bench.cli import main; "
    )
    arguments = ["serve", str(config), "--out", str(tmp_path / "out")]
    child = subprocess.Popen([sys.executable, "-c", f"{code}sys.exit(main({arguments}))"], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while len(noted(tmp_path, "request")) < 7 and time.monotonic() < deadline:
            assert child.poll() is None, child.stderr.read().decode()
            time.sleep(0.05)
        assert len(left_of(tmp_path)) == 2
        for _ in range(3):
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
        said = child.communicate(timeout=60)[1].decode()
    finally:
        child.kill()
    assert child.returncode == 128 + signal.SIGINT
    assert "Traceback" not in said
    assert left_of(tmp_path) == []


def test_an_interrupt_while_a_server_is_waited_for_kills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server(f"{FAKE} --child --ignores-sigterm --log {tmp_path / 'log'}", "m", os.environ, tmp_path / "out", 60)
    one.start()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(one.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.stop()
    one.process.wait(10)
    deadline = time.monotonic() + 10
    while left_of(tmp_path) and time.monotonic() < deadline:  # What was killed is gone when the kernel gets to it.
        time.sleep(0.01)
    assert left_of(tmp_path) == []


# ---- a comparison ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison, in whose environment somebody has left variables of the plugin."""
    folder = tmp_path_factory.mktemp("served")
    config = config_in(folder, "--policy-ms 40", acts_in=["prefill", "decode"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POLICY, '{"name": "lynx", "num_dropped": 1}')
        patch.setenv(RECORD, str(folder / "recorded"))
        assert serve(config) == OK
    return folder


@pytest.mark.slow
def test_titles_are_composed_of_facts(done: Path) -> None:
    assert prose_in(done / "out") == []
    (title,) = set(cases(load(done / "out"))["title"])
    assert re.fullmatch(r"[\w-]+, \d+ in flight, \d+ rounds of \d+ requests", title)


@pytest.mark.slow
def test_every_case_has_its_own_server_and_is_asked_the_same(done: Path) -> None:
    assert sorted(words[2] for words in noted(done, "start")) == ["None", "None", "token_drop", "topk"]
    rows = rows_in(done)
    assert list(rows) == ["native", "native again", "topk", "token_drop capacity_factor=1.0"]
    first = rows["native"]
    assert first["kind"].value_counts().to_dict() == {"load": 30, "alone": 2}
    assert first["prompt"].tolist() == list(range(32)), "each prompt once"
    for of_case in rows.values():
        assert (of_case["status"] == "ok").all()
        assert of_case["prompt"].tolist() == first["prompt"].tolist()
        assert of_case["num_tokens"].eq(5).all()
    prompts = {}
    for _, policy, _, body in noted(done, "request"):
        prompts.setdefault(policy, []).append(json.loads(body)["prompt"])
    assert len(prompts["topk"]) == 3 + 30 + 2, "a warm-up beside them"
    assert sorted(prompts["None"]) == sorted(2 * prompts["topk"])


def test_rounds_of_servers_interleave_in_an_order_that_changes(done: Path) -> None:
    by_time = [policy for _, policy, _, _ in sorted(noted(done, "request"), key=lambda words: float(words[2]))]
    rounds = by_time[4 * 3 : 4 * 3 + 10 * 12]
    orders = [tuple(rounds[first : first + 12 : 3]) for first in range(0, len(rounds), 12)]
    assert all(sorted(order) == ["None", "None", "token_drop", "topk"] for order in orders)
    assert len(set(orders)) > 3


def test_speedups_pair_requests_and_a_slower_policy_is_slower(done: Path) -> None:
    frame = cases(load(done / "out")).set_index("label")
    native, drop = frame.loc["native"], frame.loc["token_drop capacity_factor=1.0"]
    assert (native["verdict"], frame.at["native again", "verdict"]) == ("baseline", "noise floor")
    assert (drop["verdict"], drop["tpot_verdict"]) == ("slower", "slower")
    assert drop["speedup_is_interval"]
    rows = rows_in(done)
    pairs = [rows[name].query("kind == 'load'")["time_us"].to_numpy() for name in ("native", drop.name)]
    assert drop["speedup_median"] == pytest.approx(np.median(pairs[0] / pairs[1]))
    assert drop["median_ms"] == pytest.approx(np.median(pairs[1]) / 1e3)
    assert drop["tpot_ms"] >= 40
    assert drop["origin"] == "measured"


def test_answers_are_compared_with_the_same_prompts_of_native(done: Path) -> None:
    frame, rows = cases(load(done / "out")).set_index("label"), rows_in(done)
    drop = frame.loc["token_drop capacity_factor=1.0"]
    texts = [rows[name]["text"][rows[name]["kind"] == "load"] for name in ("native", drop.name)]
    assert frame.loc["native again", "equal_share"] == frame.loc["topk", "equal_share"] == 1
    assert 0 < drop["equal_share"] == np.mean([one == other for one, other in zip(*texts, strict=True)]) < 1
    assert drop["first_difference"] == 2
    assert drop["logprob_difference"] == pytest.approx(0.25)
    assert np.isnan(frame.at["native", "equal_share"])


def test_throughput_is_of_all_tokens_of_a_round(done: Path) -> None:
    requests = load(done / "out").directories[0].requests
    rows = requests[(requests["case"] == 0) & (requests["batch"] == 4)]
    end_us = (rows["sent_us"] + rows["time_us"]).max() - rows["sent_us"].min()
    assert request_times(requests).loc[(0, 0, 4, 0), "round_us"] == pytest.approx(end_us / 15)


def test_tables_figures_and_a_page_come_out(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(done / "out")]) == OK
    shown = capsys.readouterr().out
    assert "tiny, 3 in flight, 10 rounds of 3 requests: measured by a client" in shown
    assert "noise floor of a request" in shown
    assert main(["show", str(done / "out"), "--format", "html"]) == OK
    assert main(["plot", str(done / "out"), "--out", str(done / "figures")]) == OK
    drawn = pd.read_csv(done / "figures" / "served.csv")
    assert drawn["label"].tolist() == ["topk", "token_drop capacity_factor=1.0"]
    assert sorted(path.stem for path in (done / "figures").glob("*.csv")) == ["served"]


def test_the_figure_has_the_floor_of_each_quantity_and_all_shares_of_equal_answers(done: Path) -> None:
    store = load(done / "out")
    native = cases(store).set_index("label").loc["native"]
    with house_style():
        drawing = draw(FIGURES["served"], store)
    panels, drawn = drawing.figure.axes, {}
    for axes in panels:
        for patch in axes.patches:
            if patch.get_label() == "noise floor":
                drawn[axes.get_ylabel().split()[0]] = patch.get_y(), patch.get_y() + patch.get_height()
    names = {"speedup": "", "TTFT": "ttft_", "TPOT": "tpot_", "throughput": "throughput_"}
    assert drawn == {
        word: pytest.approx((native[f"{name}floor_low"], native[f"{name}floor_high"])) for word, name in names.items()
    }
    (ends,) = [axes.get_ylim() for axes in panels if axes.get_ylabel().startswith("equal")]
    assert ends == pytest.approx((-5, 105))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([], None),
        (["baseline"], "native's server was not measured, so there are no speedups"),
        (["noise"], "native was not measured a second time, so there is no noise floor and no verdict"),
    ],
)
def test_what_a_lost_native_leaves_unknown_is_warned_of(
    done: Path, lost: list[str], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(done / "out", tmp_path / "out")
    ids = [
        case_id for case_id, case in read_json(tmp_path / "out" / "run.json")["cases"].items() if case["role"] in lost
    ]
    for part in (tmp_path / "out" / "requests").iterdir():
        rows = pq.read_table(part)
        is_lost = pc.is_in(rows["case_id"], pa.array(ids, pa.string()))
        status = pc.if_else(is_lost, "failed", rows["status"])
        pq.write_table(rows.set_column(rows.schema.get_field_index("status"), "status", status), part)
    assert main(["show", str(tmp_path / "out")]) == OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "native's server was not" not in shown or lost == ["baseline"]
    assert words is None or f"warning: {words}" in shown
    assert "second time" not in shown or lost == ["noise"]


@pytest.mark.slow
@pytest.mark.parametrize("bunch", [1, 5])
def test_pieces_in_bunches_are_warned_of(tmp_path: Path, bunch: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--token-ms 100 --bunch {bunch}"
    assert serve(config_in(tmp_path, options, policies=[], rounds=1, requests=1, alone=0)) == OK
    assert main(["show", str(tmp_path / "out")]) == OK
    shown = " ".join(capsys.readouterr().out.split())
    assert ("answers came in bunches of 5.0 tokens" in shown) == (bunch == 5)
    assert ("in bunches of" in shown) == (bunch == 5)


def test_what_is_finished_is_not_repeated(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (done / "log").read_text()
    assert serve(done / "mine.yaml", "--dry-run") == OK
    assert "topk" in capsys.readouterr().out
    assert serve(done / "mine.yaml") == OK
    assert (done / "log").read_text() == before


@pytest.mark.slow
def test_a_lost_server_is_a_row_with_its_reason_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--fails-under topk --dies-under token_drop --hangs-under lynx"
    policies = [*CONFIG["policies"], {"name": "lynx", "num_dropped": 1}, {"name": "oea", "k0": 1}]
    assert serve(config_in(tmp_path, options, policies, start_s=15)) == CASES_FAILED
    frame = cases(load(tmp_path / "out")).set_index("policy")
    reasons = {name: (row["status"], row["reason"]) for name, row in frame.iterrows() if row["status"] != "ok"}
    assert reasons == {
        "topk": (
            "failed",
            "the server ended with status 2: MOE_EP_BENCH_POLICY: it does not fit",
        ),
        "token_drop": ("failed", "the warm-up: the server ended with status 3: out of memory"),
        "lynx": ("timeout", "did not answer within 15 s (serve.start_s)"),
    }
    assert frame.loc["oea", "status"] == "ok"
    assert "token_drop capacity_factor=1.0: failed: the warm-up" in capsys.readouterr().err
    assert left_of(tmp_path) == []


@pytest.mark.slow
def test_a_start_that_lost_a_server_is_asked_again_and_others_are_not(tmp_path: Path) -> None:
    config = config_in(tmp_path, f"--fails-if {tmp_path / 'broken'}", [DROP], rounds=1, requests=1, alone=0, starts=1)
    (tmp_path / "broken").touch()
    assert serve(config) == CASES_FAILED
    (tmp_path / "broken").unlink()
    more = ["--set", "serve.starts=2", "--set", "policies=[{name: topk}]"]  # nothing was there of the other
    assert serve(config, *more) == OK
    assert len(noted(tmp_path, "start")) == 2 + 2 * 3
    assert serve(config, *more) == OK
    assert len(noted(tmp_path, "start")) == 2 + 2 * 3
    assert set(cases(load(tmp_path / "out"))["status"]) == {"ok"}


@pytest.mark.slow
def test_models_of_one_name_in_other_folders_are_two(done: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, policies=[], rounds=1, requests=1, alone=0)
    for folder in ("a", "b"):
        assert serve(config, "--set", f"serve.model=/{folder}/checkpoint") == OK
    assert len(noted(tmp_path, "start")) == 4
    titles = sorted(set(cases(load(tmp_path / "out"))["title"]))
    assert [title.rpartition(", ")[2] for title in titles] == ["model /a/checkpoint", "model /b/checkpoint"]


def test_other_policies_take_nothing_from_a_directory(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (done / "out").rglob("*.parquet")}
    assert serve(done / "mine.yaml", "--set", f"policies={json.dumps([DROP])}") == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 in flight, 10 rounds of 3 requests: holds topk, which this config has not" in line
    assert {path: path.read_bytes() for path in (done / "out").rglob("*.parquet")} == before


@pytest.mark.slow
def test_shorter_answers_are_no_faster_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path, "--short-under token_drop --token-ms 20", [{"name": "topk"}, DROP], alone=0)
    assert serve(config, "--set", "prompts.max_tokens=8") == OK
    frame = cases(load(tmp_path / "out")).set_index("policy")
    drop, topk = frame.loc["token_drop"], frame.loc["topk"]
    assert drop["speedup_low"] > 1.2
    assert (drop["verdict"], drop["other_length_share"], drop["shortest"]) == ("inconclusive", 1, 4)
    assert (topk["other_length_share"], topk["shortest"]) == (0, 8)
    assert drop["tpot_speedup_is_interval"]
    capsys.readouterr()
    assert main(["show", str(tmp_path / "out")]) == OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokens/s have): token_drop capacity_factor=1.0 100 %" in shown
    assert "answers are shorter than 8 tokens, though ignore_eos was asked: token_drop capacity_factor=1.0" in shown
    rows = compare_directories(tmp_path / "out", tmp_path / "out", limit=0.03).cases.set_index("policy")
    assert rows.at["token_drop", "why"] == "answers are not as long as native's"
    assert "as long" not in str(rows.at["topk", "why"])


@pytest.mark.slow
def test_servers_in_turn_are_up_one_at_a_time_and_each_start_is_a_launch(tmp_path: Path) -> None:
    config = config_in(tmp_path, policies=[DROP], servers="in_turn", starts=2, rounds=2, requests=2, alone=0)
    assert serve(config) == OK
    assert len(noted(tmp_path, "start")) == 2 * 3
    rows = rows_in(tmp_path)["native"]
    assert sorted(rows["launch"]) == [0] * 4 + [1] * 4
    by_time = [policy for _, policy, _, _ in noted(tmp_path, "request")]
    blocks = [by_time[first : first + 6] for first in range(0, len(by_time), 6)]
    assert all(len(set(block)) == 1 for block in blocks), "a warm-up and both rounds, then the next server"
    assert cases(load(tmp_path / "out"))["num_launches"].tolist() == [2] * 3


def test_a_running_server_is_asked_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked_of = tmp_path / "asked"
    asked_of.mkdir()
    more = ["--set", "serve.starts=2", "--set", "serve.rounds=2"]
    with fake(tmp_path, f"--log {asked_of / 'log'}") as one:
        assert serve(config_in(tmp_path), "--url", f"{one.url}/v1", *more) == OK
        assert one.died() is None
    bodies = [json.loads(words[3]) for words in noted(asked_of, "request")]
    pairs = [(body["prompt"], body["cache_salt"]) for body in bodies]
    assert len(set(pairs)) == len(pairs) == 4 * (3 + 2 * 3 + 2), "a prefix cache has none of them"
    assert len({salt for _, salt in pairs}) == 4
    assert len({prompt for prompt, _ in pairs}) == 3 + 2 * 3 + 2
    assert list(rows_in(tmp_path)) == ["native", "native again"]
    assert f"one server, at {one.url}" in (main(["show", str(tmp_path / "out")]), capsys.readouterr().out)[1]
    assert comparisons(load(tmp_path / "out"))["ran_on"].tolist() == [one.url]
    assert noted(tmp_path, "start") == []


@pytest.mark.slow
def test_two_jobs_are_compared_by_their_own_native(done: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, "--first-ms 200", acts_in=["prefill", "decode"])
    assert serve(config) == OK
    change = compare_directories(done / "out", tmp_path / "out", limit=0.03)
    rows = change.cases.set_index("label")
    assert rows.at["native", "verdict"] == "slower"
    assert rows.at["token_drop capacity_factor=1.0", "outcome"] == "passed"
    assert any("conditions differ: command " in str(note) for table in change.tables for note in table.notes)


# ---- answers by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [("abc", "abc", None), ("abd", "abc", 2), ("ab", "abc", 2), ("", "a", 0), (["a", "b"], ["a", "c"], 1)],
)
def test_the_first_difference_is_the_first(ours: Any, theirs: Any, expected: int | None) -> None:
    assert first_difference(ours, theirs) == expected
    assert first_difference(theirs, ours) == expected


def test_log_probabilities_count_up_to_the_first_difference() -> None:
    place = {"kind": "load", "launch": 0, "batch": 0, "iteration": 0, "prompt": 0}
    rows = [
        {"case": 0, **place, "text": "abc", "tokens": ["a", "b", "c"], "logprobs": [-1.0, -2.0, -3.0]},
        {"case": 1, **place, "text": "abd", "tokens": ["a", "b", "d"], "logprobs": [-1.5, -2.0, -9.0]},
    ]
    found = agreement(pd.DataFrame(rows), pd.Series([0, 0])).loc[1]
    assert found[["equal_share", "first_difference", "logprob_difference"]].tolist() == [0, 2, 0.25]
    rows[1] |= {"text": "abc", "tokens": [], "logprobs": []}
    found = agreement(pd.DataFrame(rows), pd.Series([0, 0])).loc[1]
    assert found["equal_share"] == 1, "a server that lists no tokens is compared by its text"


# ---- prompts and mistakes --------------------------------------------------------------------------------------------


def test_prompts_are_the_seeds_and_warm_up_has_others() -> None:
    config = PromptsConfig(num_words=7)
    prompts = read_prompts(config, 20)
    assert prompts == read_prompts(config, 20)
    assert prompts[:5] == read_prompts(config, 5)
    assert {len(prompt.split()) for prompt in prompts} == {7}
    assert not set(prompts) & set(random_prompts(config, 20, warm_up=True))


def test_prompts_of_a_file_are_texts_token_ids_or_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "four"}]
    lines = [
        '{"prompt": "one\u2028"}',
        "",
        '{"prompt": [1, 2], "id": 3}',
        json.dumps({"messages": chat}),
        '{"prompt": "five"}',
    ]
    (tmp_path / "mine.jsonl").write_text("\ufeff" + "\r\n".join(lines))
    assert read_prompts(PromptsConfig(file=tmp_path / "mine.jsonl"), 3) == ["one\u2028", [1, 2], chat]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"prompt": "a"}'], "mine.jsonl: expected 2 prompts (serve.rounds x serve.requests + serve.alone)"),
        (['{"prompt": "a"}', "b"], "mine.jsonl: line 2: expected JSON, got 'b'"),
        (['{"text": "a"}', "[]"], 'mine.jsonl: line 1: expected {"prompt": text or token ids} or'),
        (['{"messages": [{"role": "user"}]}', "[]"], "mine.jsonl: line 1: expected"),
        (['{"prompt": [1, "a"]}', "[]"], "mine.jsonl: line 1: expected"),
        (['{"prompt": "a"}', "", "b"], "mine.jsonl: line 3: expected JSON, got 'b'"),
        (['{"prompt": "a"}', "", '{"prompt": "a"}'], "mine.jsonl: lines 1 and 3: expected each prompt once"),
        (['{"prompt": "\\ud83d"}', "b"], "mine.jsonl: line 1: expected a text that UTF-8 can hold"),
        (["[" * 100_000, "b"], "mine.jsonl: line 1: expected JSON, got '[[["),
    ],
)
def test_a_file_without_enough_prompts_is_refused(tmp_path: Path, lines: list[str], expected: str) -> None:
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert expected in refusal(read_prompts, PromptsConfig(file=tmp_path / "mine.jsonl"), 2)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("serve.rate=2", "mine.yaml: serve.concurrency, serve.rate: expected one of the two, got both"),
        ("serve.concurrency=null", "mine.yaml: serve.concurrency, serve.rate: expected one of the two, got neither"),
        ("serve.command=vllm serve", "mine.yaml: serve.command: expected {port} in it, got vllm serve"),
        ("serve.command=vllm 'serve {port}", "mine.yaml: serve.command: expected a shell's words"),
        ("serve.url=localhost:8000", "mine.yaml: serve.url: expected http://HOST:PORT or https://HOST, got localhost"),
        ("serve.servers=all", "mine.yaml: serve.servers: expected 'together' or 'in_turn', got 'all'"),
        ("sweep.serve.starts=[1, 2]", "mine.yaml: sweep: expected points that ask servers something else each, got"),
        (
            "sweep.policies=[[{name: topk}], [{name: oea, k0: 1}]]",
            "mine.yaml: sweep: expected points that ask servers something else",
        ),
        ("serve.port=1", "mine.yaml: serve.port: no such key; expected one of model, command, url, servers"),
        ("prompts.file=none.jsonl", "none.jsonl: cannot read the prompts: No such file"),
        ("policies.1.capacity_factor=-1", "capacity_factor: "),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, expected: str
) -> None:
    assert serve(config_in(tmp_path), "--set", override) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert noted(tmp_path, "start") == []


def test_tasks_without_the_harness_are_refused_by_the_extras_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    task_manager.cache_clear()
    assert serve(config_in(tmp_path), "--set", 'tasks=[{"name": "arc_easy"}]') == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected the package lm_eval, which tasks need: pip install 'moe-ep-bench[harness]'" in line
    assert noted(tmp_path, "start") == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", "serve.url: expected http://HOST:PORT or https://HOST, got ''"),
        ("null", "serve.url: expected http://HOST:PORT or https://HOST, got null"),
        ("http://localhost:port", "serve.url: expected http://HOST:PORT or https://HOST, got http://localhost:port"),
        ("http://[::1", "serve.url: expected http://HOST:PORT"),
        ("http://", "serve.url: expected http://HOST:PORT"),
        ("http://a b", "serve.url: expected http://HOST:PORT"),
        ("http://host/v1?key=1", "serve.url: expected http://HOST:PORT"),
        ("http://user:s3cret@host/v1/", "serve.url: expected no user or password in it; a key is read from"),
    ],
)
def test_a_url_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, expected: str
) -> None:
    assert serve(config_in(tmp_path), "--url", url) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert "s3cret" not in line
    assert noted(tmp_path, "start") == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        ("--models-status 401", "failed", "HTTP 401: it wants another key (in OPENAI_API_KEY)"),
        ("--models '<html>'", "failed", "/v1/models: expected a list of models, got '<html>'"),
        ("--models '{}'", "failed", "/v1/models: expected a list of models, got '{}'"),
        ('--models \'{"data": [{"id": 5}]}\'', "failed", "/v1/models: expected a list of models"),
        ('--models \'{"data": [{"id": "a"}, {"id": "b"}]}\'', "failed", "expected one of a, b at"),
        ("--models-status 500", "timeout", "500"),
        ("--drips", "timeout", "did not answer within 3 s (serve.start_s)"),
    ],
)
def test_a_server_without_a_name_is_a_reason(tmp_path: Path, options: str, status: str, expected: str) -> None:
    limit_s = 60 if status == "failed" else 3
    one = Server(f"{FAKE} {options}", "/models/tiny", os.environ, tmp_path / "server.log", limit_s)
    with pytest.raises(ServerError) as refused:
        one.start()
    assert refused.value.status == status
    assert expected in refused.value.reason
    # The same of a server that runs already.
    one._spawn()
    try:
        while server._is_taken(one.port) is False:
            time.sleep(0.05)
        with pytest.raises(ServerError) as refused:
            Running(one.url, "/models/tiny", 3).start()
    finally:
        one.stop()
    assert expected in refused.value.reason


def test_a_listener_of_somebody_else_is_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(tmp_path) as other:
        monkeypatch.setattr(server, "free_port", lambda: other.port)
        sleeps = Server("sleep 1000 {port}", "m", os.environ, tmp_path / "log", 6)
        with pytest.raises(ServerError, match=f"who answers at port {other.port} is no process of its own"):
            sleeps.start()


def test_nobody_at_a_url_is_a_reason() -> None:
    with pytest.raises(ServerError, match=r"http://127.0.0.1:\d+/v1/models: "):
        Running(f"http://127.0.0.1:{server.free_port()}", "m", 2).start()
