"""A server that speaks OpenAI's protocol and nothing else: fake_server.py PORT [--option VALUE ...].

It answers as the plugin's variable says: tokens count up, under a policy that drops some differ, and each takes its
time. Options break it: at a start, at a request, or in what it says. A prompt that is JSON says what to say in place of
a choice (``choice``), of the last event (``end``), of the count (``tokens``), or of the first event (``data``, repeated
``times``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--first-ms", type=float, default=20)
    parser.add_argument("--token-ms", type=float, default=2)
    parser.add_argument("--policy-ms", type=float, default=0, help="more for each token under a policy")
    parser.add_argument("--dies-under", help="a policy under which it ends at its third request")
    parser.add_argument("--fails-under", help="a policy under which it does not start")
    parser.add_argument("--hangs-under", help="a policy under which it never answers")
    parser.add_argument("--refuses", action="store_true", help="requests, with status 400")
    parser.add_argument("--breaks-off", action="store_true", help="before the end of a stream")
    parser.add_argument("--bunch", type=int, default=1, help="pieces that are sent at once")
    parser.add_argument("--no-whole-answers", action="store_true", help="but streams, else with status 500")
    parser.add_argument("--bare", action="store_true", help="neither log-probabilities nor a usage")
    parser.add_argument("--models", help="what it says of its models, word for word")
    parser.add_argument("--models-status", type=int, default=200)
    parser.add_argument("--drips", action="store_true", help="a byte at a time, of its models")
    parser.add_argument("--ignores-sigterm", action="store_true")
    parser.add_argument("--short-under", help="a policy under which answers are half as long")
    parser.add_argument("--fails-if", help="a file; under a policy it does not start while that is there")
    parser.add_argument("--child", action="store_true", help="has a child that outlives it")
    parser.add_argument("--log", help="a file that gets a line a start and a request")
    options = parser.parse_args()
    policy = json.loads(os.environ.get("MOE_EP_BENCH_POLICY", "{}")).get("name")
    if policy and policy == options.fails_under:
        print("Traceback: much\nmore", flush=True)
        with open(os.environ["MOE_EP_BENCH_REFUSAL"], "w") as file:
            file.write("MOE_EP_BENCH_POLICY: it does not fit")
        sys.exit(2)
    if policy and options.fails_if and os.path.exists(options.fails_if):
        sys.exit(2)
    if policy and policy == options.hangs_under:
        time.sleep(1000)
    if options.child:
        ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", ignoring])
        note(options.log, f"child {child.pid}")
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler_of(options, policy))
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignores_sigterm else lambda *_: os._exit(0))
    note(options.log, f"start {os.getpid()} {policy}")
    server.serve_forever()


def note(path: str | None, line: str) -> None:
    if path:
        with open(path, "a") as log:
            log.write(f"{line}\n")


def handler_of(options: argparse.Namespace, policy: str | None) -> type[BaseHTTPRequestHandler]:
    number = iter(range(10**9))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # which would hold pieces back

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            body = (options.models or '{"data": [{"id": "served-name"}]}').encode()
            note(options.log, f"models {self.headers['Authorization']}")
            self.send_response(options.models_status)
            self.send_header("Content-Length", str(10**6 if options.drips else len(body)))
            self.end_headers()
            while options.drips:
                self.wfile.write(b" ")
                time.sleep(0.1)
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            note(options.log, f"request {policy} {time.monotonic()} {json.dumps(asked)}")
            if policy and policy == options.dies_under and next(number) == 2:
                print("out of memory", flush=True)
                os._exit(3)
            if options.refuses:
                key = self.headers["Authorization"]
                self.answer(400, {"error": {"message": f"prompt too long\x1b[31m for {key}"}})
                return
            pieces = asked["max_tokens"] if not options.breaks_off else 2
            pieces = pieces // 2 if policy and policy == options.short_under else pieces
            # The answer is of the prompt alone; under a dropping policy it turns at the third token of every other.
            is_chat = self.path == "/v1/chat/completions"
            prompt = asked["messages"][-1]["content"] if is_chat else asked["prompt"]
            prompt = prompt if isinstance(prompt, str) else prompt[0]
            size, wanted = len(prompt), json.loads(prompt) if prompt.startswith("{") else {}
            turns = policy == "token_drop" and size % 2 == 0
            if not asked.get("stream") and options.no_whole_answers:
                self.answer(500, {"error": {"message": "out of memory"}})
                return
            if not asked.get("stream"):
                words = [f" {size + place + (turns and place >= 2)}" for place in range(pieces)]
                self.answer(200, {"choices": [{"index": 0, "text": "".join(words)}]})
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            first = {"delta": {"role": "assistant", "content": ""}} if is_chat else {"text": ""}
            self.events({"choices": [first]})  # of no token
            if "data" in wanted:
                self.chunk(f"data: {wanted['data'] * wanted.get('times', 1)}\n\n".encode())
            held: list[Any] = []
            for place in range(pieces):
                time.sleep((options.first_ms if place == 0 else options.token_ms) / 1e3)
                time.sleep(options.policy_ms / 1e3 if policy else 0)
                word = f" {size + place + (turns and place >= 2)}"
                logprob = -0.5 if policy is None else -0.75
                said = {"tokens": [word], "token_logprobs": [logprob]}
                if is_chat:
                    said = {"content": [{"token": word, "logprob": logprob}]}
                choice = {"delta": {"content": word}} if is_chat else {"text": word}
                choice = choice if options.bare else {**choice, "logprobs": said}
                held.append({"choices": [{**choice, **wanted.get("choice", {})}]})
                if len(held) == options.bunch or place == pieces - 1:
                    self.events(*held)
                    held.clear()
            if options.breaks_off:
                self.close_connection = True
                return
            if not options.bare:
                usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": wanted.get("tokens", pieces)}
                self.events({"choices": [], "usage": usage, **wanted.get("end", {})})
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def events(self, *contents: Any) -> None:
            said = "".join(f"data: {json.dumps(content, ensure_ascii=False)}\n\n" for content in contents)
            if not said.isascii() and any("\ud800" <= character <= "\udfff" for character in said):
                said = "".join(f"data: {json.dumps(content)}\n\n" for content in contents)
            self.chunk(said.encode())

        def chunk(self, content: bytes) -> None:
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
            self.wfile.flush()

    return Handler


if __name__ == "__main__":
    main()
