#!/usr/bin/env python3
"""serve/page.html in headless Chromium, under the server's Content-Security-Policy. Api answers as the server does, and
as it does when something goes wrong."""
import json
import os
import shutil
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness import ROOT, text_of
from serving import ChatModelTest, Server

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select, WebDriverWait
except ImportError:
    webdriver = None

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WEB_DRIVER = shutil.which("chromedriver")
PAGE = text_of(os.path.join(ROOT, "serve", "page.html"))
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
KEY = "a key"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SECONDS = 30  # the longest wait; nothing here takes one


class Api(BaseHTTPRequestHandler):
    """What the last message or the prompt is decides what happens; other texts come back twice, a character a piece."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, kind, body, **headers):
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": len(body), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message):
        self.answer(status, "application/json", json.dumps({"error": {"message": message}}).encode())

    def authorized(self):
        if not self.server.key or self.headers["Authorization"] == f"Bearer {KEY}":
            return True
        self.refuse(401, "the API key is missing or wrong")
        return False

    def do_GET(self):
        if self.path == "/":
            self.answer(200, "text/html; charset=utf-8", PAGE.encode(), **{"Content-Security-Policy": POLICY})
        elif self.path == "/v1/models" and self.authorized():
            models = [{"id": name, "object": "model", "chat": chat} for name, chat in self.server.models.items()]
            self.answer(200, "application/json", json.dumps({"object": "list", "data": models}).encode())
        elif self.path != "/v1/models":
            self.refuse(404, f"there is no {self.path}")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.authorized():
            return
        self.server.requests.append((self.path, request))
        chat = self.path == "/v1/chat/completions"
        text = request["messages"][-1]["content"] if chat else request["prompt"]
        if text == "refuse":
            self.refuse(400, "temperature is <b>-1</b>, expected 0 or more")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.stream(chat, text)
        self.close_connection = True

    def send(self, event):
        # In two parts that may split a character, as a network may.
        data = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
        for part in data[:len(data) // 2], data[len(data) // 2:]:
            self.wfile.write(part)
            self.wfile.flush()

    def send_piece(self, chat, piece, reason=None):
        text = {"delta": {"content": piece}} if chat else {"text": piece}
        self.send({"choices": [{"index": 0, "finish_reason": reason, **text}]})

    def stream(self, chat, text):
        if chat:
            self.send({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        if text.startswith("endless"):
            try:
                while True:
                    self.send_piece(chat, "more ")
                    time.sleep(0.01)
            except OSError:
                self.server.gone.set()
                return
        if text == "silent":
            self.server.released.wait(SECONDS)
            return
        for piece in text + text:
            self.send_piece(chat, piece)
        if text == "cut":
            return
        if text == "fault":
            self.send({"error": {"message": "the GPU reports an error"}})
            return
        self.send_piece(chat, "", "length")
        self.send({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2 * len(text)}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")


@unittest.skipUnless(webdriver and BROWSER and WEB_DRIVER,
                     "needs Chromium with its driver (Debian: chromium-driver) and Python's selenium (make venv)")
class BrowserTest(unittest.TestCase):
    """Has a browser, and the page at `url`."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        # In a container there may be no sandbox (root) and little shared memory.
        for argument in "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1000,800":
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.browser = webdriver.Chrome(options, webdriver.ChromeService(WEB_DRIVER))
        cls.addClassCleanup(cls.browser.quit)

    def tearDown(self):
        # What violates the policy, and JavaScript's exceptions; that a request failed is in the log as well.
        log = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        self.assertEqual([line for line in log if "Failed to load resource" not in line], [])

    def open(self):
        self.browser.get(self.url)
        self.wait_for(lambda: self.the("input").get_attribute("placeholder"))

    def the(self, name):
        return self.browser.find_element(By.ID, name)

    def wait_for(self, condition):
        return WebDriverWait(self.browser, SECONDS, 0.02).until(lambda _: condition())

    def ask(self, text):
        """Types the text and Enter, and waits for the end of the response."""
        self.the("input").send_keys(text, Keys.ENTER)
        self.wait_for(lambda: self.the("send").is_displayed())

    def conversation(self):
        return self.browser.execute_script("return [...document.querySelectorAll('article')]"
                                           ".map(a => [a.className, a.querySelector('p').textContent])")

    def error(self):
        return self.the("error").text

    def set_field(self, name, value):
        if not self.the("settings").is_displayed():
            self.the("toggle").click()
        self.the(name).send_keys(Keys.CONTROL + "a" + Keys.CONTROL, Keys.DELETE, value, Keys.TAB)


class ServedPageTest(BrowserTest, ChatModelTest):
    """The page as the server has it."""

    def test_served_page(self):
        server = Server("--model", self.model, "--context", 250)
        self.addCleanup(server.__exit__)
        self.assertEqual(server.ask("GET", "/")[1]["Content-Security-Policy"], POLICY)
        self.url = server.url
        self.open()
        self.set_field("temperature", "0")
        self.ask("Hi")
        self.assertEqual(self.conversation(), [["user", "Hi"], ["assistant", "Yo"]])
        self.assertRegex(self.the("status").text, r"^2 tokens, [\d.]+ tokens/s, ")
        self.open()
        self.assertEqual(self.conversation(), [["user", "Hi"], ["assistant", "Yo"]])
        text = "<img src=x onerror=document.title='x'>"
        self.ask(text)
        self.assertEqual(self.conversation()[2], ["user", text])
        self.assertEqual(self.browser.title, "tiny")
        self.ask("x" * 250)
        self.assertRegex(self.error(), r"^a prompt of \d+ tokens exceeds the context of 250 tokens")
        self.the("new").click()
        os.remove(os.path.join(self.model, "chat_template.jinja"))
        base = Server("--model", self.model, "--context", 250)
        self.addCleanup(base.__exit__)
        self.url = base.url
        self.open()
        self.ask("<|im_start|>")
        self.assertTrue(self.the("log").text.startswith("<|im_start|>"))
        self.assertEqual((len(self.conversation()), self.error()), (2, ""))


class PageTest(BrowserTest):
    def setUp(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
        server.key, server.models, server.requests = False, {"tiny": True}, []
        server.gone, server.released = threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.addCleanup(server.released.set)
        self.server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

    def test_a_conversation(self):
        self.open()
        self.assertEqual(self.the("name").text, "tiny")
        self.assertFalse(self.the("choice").is_displayed())
        self.assertFalse(self.the("regenerate").is_enabled())
        self.ask("Hé ")
        self.assertEqual(self.conversation(), [["user", "Hé "], ["assistant", "Hé Hé "]])
        path, request = self.server.requests[0]
        self.assertEqual((path, request), ("/v1/chat/completions", {
            "model": "tiny", **STREAM, "messages": [{"role": "user", "content": "Hé "}]}))
        self.assertRegex(self.the("status").text, r"^6 tokens, [\d.]+ tokens/s, first after [\d.]+ s, "
                                                  r"the limit of tokens is reached$")
        # A line end by Shift+Enter; the model is sent the whole conversation.
        self.the("input").send_keys("a", Keys.SHIFT + Keys.ENTER)
        self.the("input").send_keys(Keys.NULL)
        self.ask("b")
        self.assertEqual(self.conversation()[2:], [["user", "a\nb"], ["assistant", "a\nba\nb"]])
        sent = [{"role": role, "content": text} for role, text in self.conversation()]
        self.assertEqual(self.server.requests[1][1]["messages"], sent[:3])
        # Nothing is sent for an empty message.
        self.the("input").send_keys(Keys.ENTER)
        self.the("send").click()
        self.the("regenerate").click()
        self.wait_for(lambda: len(self.server.requests) == 3 and self.the("send").is_displayed())
        self.assertEqual(self.server.requests[2], self.server.requests[1])
        self.assertEqual(len(self.conversation()), 4)
        before = self.conversation()
        self.the("input").send_keys("a draft")
        self.open()
        self.assertEqual((self.conversation(), self.the("input").get_property("value")), (before, "a draft"))
        self.the("new").click()
        self.assertEqual(self.conversation(), [])
        self.open()
        self.assertEqual(self.conversation(), [])

    def test_text_is_never_html(self):
        self.open()
        for text in "<img src=x onerror=document.title='x'>", "<script>document.title = 'x'</script>", "&lt;b&gt;":
            self.ask(text)
            self.assertEqual(self.conversation()[-2:], [["user", text], ["assistant", text + text]])
        self.server.models["<b>other</b>"] = True
        self.open()
        self.assertEqual([option.text for option in Select(self.the("model")).options], ["tiny", "<b>other</b>"])
        self.assertEqual(self.browser.find_elements(By.CSS_SELECTOR, "img, b, article p *"), [])
        self.ask("refuse")
        self.assertEqual(self.error(), "temperature is <b>-1</b>, expected 0 or more")
        self.assertEqual(self.browser.title, "train_gpt")

    def test_stop(self):
        self.open()
        for stop in (lambda: self.the("stop").click()), (lambda: self.the("input").send_keys(Keys.ESCAPE)):
            self.server.gone.clear()
            self.the("input").send_keys("endless", Keys.ENTER)
            self.wait_for(lambda: self.conversation()[-1][1].startswith("more more"))
            self.assertEqual(self.the("log").get_attribute("aria-busy"), "true")
            requests = len(self.server.requests)
            self.the("input").send_keys("later", Keys.ENTER)  # stays where it is
            self.assertEqual(len(self.server.requests), requests)
            stop()
            self.wait_for(lambda: self.the("send").is_displayed())
            self.assertTrue(self.server.gone.wait(SECONDS), "the connection is not closed")
            self.assertEqual((self.the("status").text, self.error()), ("Stopped.", ""))
            self.assertTrue(self.conversation()[-1][1].startswith("more more"))
            self.assertEqual(self.the("input").get_property("value"), "later")
            self.the("input").clear()
        # Before a response has begun, what was typed is typed again; a reload keeps the beginning of a response.
        before = self.conversation()
        self.the("input").send_keys("silent", Keys.ENTER)
        self.wait_for(lambda: self.the("stop").is_displayed())
        self.the("stop").click()
        self.wait_for(lambda: self.the("send").is_displayed())
        self.assertEqual((self.conversation(), self.the("input").get_property("value")), (before, "silent"))
        self.the("input").clear()
        self.the("input").send_keys("endless again", Keys.ENTER)
        self.wait_for(lambda: self.conversation()[-1][1].startswith("more more"))
        self.open()
        self.assertEqual([text[:9] for _, text in self.conversation()[-2:]], ["endless a", "more more"])

    def test_errors(self):
        self.open()
        self.ask("refuse")
        self.assertEqual(self.conversation(), [])
        self.assertEqual(self.the("input").get_property("value"), "refuse")
        self.the("input").clear()
        self.ask("cut")
        self.assertEqual(self.error(), "The connection ended before the response was complete.")
        self.assertEqual(self.conversation(), [["user", "cut"], ["assistant", "cutcut"]])
        self.ask("fault")
        self.assertEqual(self.error(), "the GPU reports an error")
        self.ask("fine")
        self.assertEqual((self.error(), len(self.conversation())), ("", 6))
        self.server.shutdown()
        self.server.server_close()
        self.ask("anybody?")
        self.assertEqual(self.error(), "The server does not answer. Is it running?")
        self.assertEqual((len(self.conversation()), self.the("input").get_property("value")), (6, "anybody?"))
        self.the("regenerate").click()  # loses no response
        self.wait_for(lambda: self.the("send").is_displayed())
        self.assertEqual(self.conversation()[-1], ["assistant", "finefine"])

    def test_settings(self):
        self.server.key = True
        self.open()
        self.wait_for(lambda: self.error() == "the API key is missing or wrong")
        self.assertTrue(self.the("key").is_displayed())
        self.set_field("key", KEY)
        self.wait_for(lambda: self.the("name").text == "tiny")
        self.assertEqual(self.error(), "")
        self.set_field("system", "Be brief.")
        settings = {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
                    "presence_penalty": -0.5, "frequency_penalty": 0.25, "max_tokens": 9, "seed": 9007199254740991}
        for name, value in settings.items():
            self.set_field(name, str(value))
        for again in False, True:  # after a reload, too
            self.ask("x")
            request = self.server.requests[-1][1]
            self.assertEqual(request.pop("messages")[0], {"role": "system", "content": "Be brief."})
            self.assertEqual(request, {"model": "tiny", **STREAM, **settings})
            if not again:
                self.open()
        for name in settings:
            self.set_field(name, "")
        self.set_field("seed", "-")  # no number: not sent as if it were empty
        requests = len(self.server.requests)
        self.ask("x")
        self.assertEqual(len(self.server.requests), requests)
        self.set_field("seed", "")
        self.ask("x")
        self.assertEqual(set(self.server.requests[-1][1]), {"model", "messages", *STREAM})

    def test_a_model_without_a_chat_template(self):
        self.server.models = {"adapter": True, "base": False}
        self.open()
        Select(self.the("model")).select_by_visible_text("base")
        self.set_field("max_tokens", "5")
        self.assertFalse(self.the("system").is_displayed())
        self.ask("ab")
        path, request = self.server.requests[0]
        self.assertEqual((path, request), ("/v1/completions", {
            "model": "base", **STREAM, "prompt": "ab", "max_tokens": 5}))
        self.assertEqual(self.the("log").text, "ababab")
        self.ask("")  # goes on
        self.assertEqual(self.server.requests[1][1]["prompt"], "ababab")
        self.ask("c")
        self.assertEqual(self.server.requests[2][1]["prompt"], 3 * "ababab" + "c")
        self.the("regenerate").click()
        self.wait_for(lambda: len(self.server.requests) == 4 and self.the("send").is_displayed())
        self.assertEqual(self.server.requests[3], self.server.requests[2])
        self.open()
        self.assertEqual(Select(self.the("model")).first_selected_option.text, "base")
        Select(self.the("model")).select_by_visible_text("adapter")
        self.assertEqual(self.the("send").text, "Send")
        self.ask("d")
        self.assertEqual((self.server.requests[4][0], self.server.requests[4][1]["model"]),
                         ("/v1/chat/completions", "adapter"))

    def test_a_telephone(self):
        self.addCleanup(self.browser.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
        self.addCleanup(self.browser.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": []})
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True})
        self.server.models["another-model-with-a-name-that-is-long"] = False
        self.open()
        self.ask("long" * 100)
        colours = set()
        for scheme in "light", "dark":
            self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                         {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
            colours.add(self.browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(len(colours), 2)
        for name in "input", "send", "regenerate", "new", "toggle", "model":
            box = self.the(name).rect
            self.assertLessEqual(box["x"] + box["width"], 360, name)
            self.assertLessEqual(box["y"] + box["height"], 640, name)
        self.assertLessEqual(self.browser.execute_script("return document.documentElement.scrollWidth"), 360)
        self.assertTrue(self.browser.execute_script("const s = document.getElementById('scrolls');"
                                                    "return s.scrollTop + s.clientHeight >= s.scrollHeight - 2"))
        self.the("toggle").click()
        self.assertEqual(self.the("settings").rect["width"], 360)
        unnamed = self.browser.execute_script(
            "return [...document.querySelectorAll('input, select, textarea, button')]"
            ".filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.id)")
        self.assertEqual(unnamed, [])


if __name__ == "__main__":
    unittest.main()
