"""A small HTTP server that speaks as vLLM or SGLang do: streamed completions, counters, server info.

It answers the prompts of an evaluation with the target's own answers, in the steps in which speculative
decoding found them, and counts those steps as the engine would.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dflash_core import evaluation
from dflash_core.manifest import Dataset


class Engine(ThreadingHTTPServer):
    """A running engine; stop it with `close`.

    Args:
        kind: `vllm` or `sglang`.
        forget: drafts that it accepts fewer in each step, as a server does that runs another drafter.
    """

    daemon_threads = True

    def __init__(self, kind: str, measured: Dataset, tokenizer: Any, forget: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.forget, self.tokenizer = kind, forget, tokenizer
        self.lock, self.asked, self.in_flight, self.most_in_flight = threading.Lock(), [], 0, 0
        self.crowded = threading.Event()  # two requests were in flight at once
        self.steps, self.drafts, self.accepted, self.by_slot = 0, 0, 0, [0] * 16
        body = json.loads(measured.storage.get("prompts.json"))
        records = [measured.record(unit) for unit in evaluation.units(measured)]
        self.answers = {
            tuple(prompt["input_ids"]): record
            for prompt, record in zip(body["prompts"], records, strict=True)
        }
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def count(self, outcome: dict) -> None:
        with self.lock:
            for accepted, judged in zip(outcome["accepted"], outcome["judged"], strict=True):
                accepted = max(accepted - self.forget, 0)
                self.steps += 1
                self.drafts += judged
                self.accepted += accepted
                for slot in range(accepted):
                    self.by_slot[slot] += 1

    def metrics(self) -> str:
        labels = '{engine="0",model_name="served"}'
        lines = [
            "# TYPE vllm:spec_decode_num_drafts counter",
            f"vllm:spec_decode_num_drafts_total{labels} {float(self.steps)}",
            f"vllm:spec_decode_num_drafts_created{labels} 1.7e9",
            f"vllm:spec_decode_num_draft_tokens_total{labels} {float(self.drafts)}",
            f"vllm:spec_decode_num_accepted_tokens_total{labels} {float(self.accepted)}",
        ]
        for slot, count in enumerate(self.by_slot):
            place = labels.replace("}", f',position="{slot}"}}')
            lines.append(
                f"vllm:spec_decode_num_accepted_tokens_per_pos_total{place} {float(count)}"
            )
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_created{place} 1.7e9")
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/v1/models":
            return self._json(200, {"data": [{"id": "served"}]})
        if self.path == "/metrics" and server.kind == "vllm":
            return self._send(200, "text/plain", server.metrics().encode())
        if self.path == "/get_server_info" and server.kind == "sglang":
            length = 1 + server.accepted / server.steps if server.steps else None
            return self._json(200, {"internal_states": [{"avg_spec_accept_length": length}]})
        return self._json(404, {"error": "not found"})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        assert body["model"] == "served"
        assert body["stream"]
        with server.lock:
            server.asked.append(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            if server.in_flight > 1:
                server.crowded.set()
        server.crowded.wait(0.3)  # answers are too quick to meet a second request by themselves
        try:
            self._stream(server.answers[tuple(body["prompt"])])
        finally:
            with server.lock:
                server.in_flight -= 1

    def _stream(self, record: dict) -> None:
        """The answer in the pieces in which it was found, then the usage."""
        tokens, outcome = record["plain"]["tokens"], record["outcomes"]["after"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        ends = [1]
        for accepted in outcome["accepted"]:
            ends.append(min(ends[-1] + accepted + 1, len(tokens)))
        said = ""
        for end in ends:
            text = self.server.tokenizer.decode(tokens[:end], skip_special_tokens=True)
            self._event({"choices": [{"index": 0, "text": text[len(said) :]}]})
            said = text
        self.server.count(outcome)
        self._event({"choices": [], "usage": {"completion_tokens": len(tokens)}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, body: dict) -> None:
        self._chunk(f"data: {json.dumps(body)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, body: dict) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
