"""A program with OpenAI's completions that starts at once: `python external_program.py PORT`.

Each word that it writes follows from the prompt, and takes it some milliseconds. As vLLM, it has
`/health`, `/metrics` and fields of its own.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAUSE = 0.01  # seconds before each word
FIELDS = {"model", "prompt", "max_tokens", "stream", "tools", "ignore_eos", "speculative"}
# Another program: it is ready, and ends at its first request.
ENDS = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("CudaError: no memory", flush=True)
        os._exit(1)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def words(prompt: str, count: int) -> list[str]:
    return [f" {prompt[n % len(prompt)]}{n}" for n in range(count)]


class Words(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    written = 0
    ended = False

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        found = {
            "/health": "",
            "/v1/headers": json.dumps([*self.headers.items()]),
            "/adapters": "not for clients",
            "/v1/models": json.dumps({"data": [{"id": "tiny"}, {"id": "an-adapter"}]}),
            "/metrics": "# TYPE vllm:generation_tokens counter\n"
            f"vllm:generation_tokens_total {Words.written}\n",
        }
        if self.path == "/health" and Words.ended:
            self._send(503, "")
        elif self.path == "/health" or self._has_key():
            self._send(200 if self.path in found else 404, found.get(self.path, "no such path"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._has_key():
            return
        if unknown := body.keys() - FIELDS:
            self._send(400, json.dumps({"error": {"message": f"unknown: {min(unknown)}"}}))
            return
        if body["prompt"] == "the engine ends":
            self._end(bool(body.get("stream")))
            return
        if not body.get("stream"):
            text = "".join(self._words(body))
            self._send(200, json.dumps({"choices": [{"text": text}], "asked": body}))
            return
        self._begin_stream()
        for word in self._words(body):
            self._chunk(f"data: {json.dumps({'choices': [{'text': word}], 'reasoning': None})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _end(self, stream: bool) -> None:
        """As vLLM, whose front end outlives its engine for a moment."""
        Words.ended, error = True, json.dumps({"error": {"message": "EngineCore", "code": 500}})
        if stream:
            self._begin_stream()
            last = f"data: {json.dumps({'choices': [{'text': 'a'}]})}\n\n"
            self._chunk(last)
            time.sleep(0.1)
            self._chunk(f"{last}data: {error}\n\n")  # events may come together
        else:
            self._send(500, error)
        threading.Timer(0.3, os._exit, (1,)).start()

    def _has_key(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        found = key is None or self.headers["authorization"] == f"Bearer {key}"
        if not found:
            self._send(401, "no key")
        return found

    def _words(self, body: dict[str, object]) -> Iterator[str]:
        for word in words(str(body["prompt"]), int(str(body["max_tokens"]))):
            time.sleep(PAUSE)
            Words.written += 1
            yield word

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("set-cookie", "a=1")
        self.send_header("set-cookie", "b=2")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Words).serve_forever()
