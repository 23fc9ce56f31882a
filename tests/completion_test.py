#!/usr/bin/env python3
"""Tests `tessera completion` in real shells: bash on its own terminal, and zsh and fish if they are
installed. Also tests the manual pages that deploy/tools/manual.py makes from the help texts."""

import os
import re
import shutil
import sys

import outsider as o
from terminal import Terminal


class CompletionTest(o.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.address = f"unix:{cls.folder}/socket"
        cls.serve_class(listen=cls.address, device="cpu")
        cls.environment = {
            "PATH": f"{os.path.dirname(o.Program.cli)}:/usr/bin:/bin", "HOME": str(cls.folder),
            "TERM": "dumb", "PS1": "$ ", "LC_ALL": "C.UTF-8", "TESSERA_SERVER": cls.address}
        (cls.folder / "weights.npy").touch()
        for name in ("digits", "digests/2", "other"):
            cls.run_cli("put", "--name", name, "--random", "ones", "--shape", "2x3")

    @classmethod
    def run_cli(cls, *words, server=None):
        result = o.run(o.Program.cli, "--server", server or cls.address, *words)
        if result.returncode != 0:
            raise AssertionError(f"{words}: {result.stderr}")
        return result.stdout

    def types(self, shell, *cases):
        """Returns the shell's output for typed lines. The first line prints "ready"."""
        terminal = Terminal(*shell, cwd=self.folder, **self.environment)
        self.addCleanup(terminal.close)
        for typed, line in cases:
            with self.subTest(typed):
                terminal.key(typed.encode())
                terminal.wait_for(line.encode())
                if line != "ready":
                    terminal.key(b"\x15")  # Deletes the line.

    def complete(self, *words, server=None):
        lines = self.run_cli("complete", "--", *words, server=server).splitlines()
        return lines[0], [line.split("\t")[0] for line in lines[1:]]

    def test_what_is_offered(self):
        for words, offered in [
            ("to", ["token", "top", "topk"]), ("bench win", ["window-sum"]),
            ("comp", ["completion"]),  # `complete` is for scripts.
            ("top --m", ["--metrics"]), ("reduce va", ["variance"]), ("reduce sum --dtype", []),
            ("put --random un", ["uniform"]), ("put --random=un", ["--random=uniform"]),
            ("matmul --trans", ["--transpose-a", "--transpose-b"]),
            ("matmul --time", ["--timeout"]),  # An option of the program itself.
            ("put --na", ["--name"]),  # A file would be possible as well.
            ("matmul -- --trans", []), ("dot di", ["digests/2", "digits"]),
            ("dot --strategy fixed_tree di", ["digests/2", "digits"]),
            ("dot digits ot", ["other"]), ("rm digits other dige", ["digests/2"]),
            ("dot a b di", []),  # There is no third operand.
            ("dot --strategy cpu_p", ["cpu_parallel"]), ("bench window-sum --strategy c", ["cpu"]),
            ("topk digits --indices-out", ["--indices-out", "--indices-output"]),
            ("search digits --queries ot", ["other"]), ("search digits --metric ", ["dot", "l2"]),
            ("strategies red", ["reduce", "reduce_axes"]), ("put --device ", ["cpu"]),
        ]:
            with self.subTest(words):
                kind, found = self.complete(*words.split(" "))
                self.assertEqual((kind, sorted(found)), ("words", sorted(offered)))
        self.assertIn("digits\tf32 [2, 3]\n", self.run_cli("complete", "--", "rm", "digi"))

    def test_files_are_the_shells_business(self):
        for words in [("put", ""), ("run", ""), ("reduce", "-o", ""), ("--tls-ca", "")]:
            self.assertEqual(self.complete(*words), ("files", []), words)

    def test_the_server_of_the_line_is_asked(self):
        nobody = f"unix:{self.folder}/nobody"
        self.assertEqual(self.complete("dot", "di", server=nobody), ("words", []))
        for flag in [("--server", self.address), ("-s", self.address),
                     (f"--server={self.address}",)]:
            _, found = self.complete(*flag, "dot", "digi", server=nobody)
            self.assertEqual(found, ["digits"], flag)

    def test_words_that_bash_would_not_take_as_they_are(self):
        """A hostile server sends such words, and the shell would execute some of them."""
        bad = ["$(touch$IFS./x)", "`id`", "a;b", "a b", "a&b", "a\nb", "a'b", "-rf", "~", "*",
               "{a,b}"]
        o.make_stubs()
        buffers, compute = o.buffers, o.compute
        answers = {"ListBuffers": buffers.ListBuffersResponse(
                       buffers=[buffers.Buffer(name=name) for name in [*bad, "a/b.c_d-e"]]),
                   "ListStrategies": compute.ListStrategiesResponse(
                       strategies=[compute.Strategy(operation=name, name=name, available=True)
                                   for name in [*bad, "fixed_tree"]]),
                   "GetServerInfo": compute.GetServerInfoResponse(
                       devices=[compute.Device(name=name) for name in [*bad, "cuda:0"]])}

        def answer(method, _):
            return answers[method.rsplit("/", 1)[1]].SerializeToString()

        with o.answering(answer) as server:
            for words, offered in ((("rm", ""), ["a/b.c_d-e"]),
                                   (("put", "--device", ""), ["cuda:0"]),
                                   (("dot", "--strategy", ""), ["fixed_tree"]),
                                   (("strategies", ""), ["fixed_tree"])):
                self.assertEqual(self.complete(*words, server=server), ("words", offered))

    def test_bash(self):
        self.types(
            ("bash", "--norc", "--noprofile", "-i"),
            ('bind "set enable-bracketed-paste off"; eval "$(tessera completion bash)"; '
             'echo rea""dy\n', "ready"),
            ("tessera stra\t", "tessera strategies "),
            ("tessera reduce variance digi\t", "tessera reduce variance digits "),
            ("tessera put --random=unif\t", "tessera put --random=uniform "),
            ("tessera put --dtype bf\t", "tessera put --dtype bf16 "),
            ("tessera put weig\t", "tessera put weights.npy "),
            (f"tessera -s {self.address} dot oth\t", f"tessera -s {self.address} dot other "),
            ("tessera map '(a - b) * 2' digi\t", "tessera map '(a - b) * 2' digits "))

    def test_zsh(self):
        if not shutil.which("zsh"):
            self.skipTest("zsh is not installed")
        self.types(("zsh", "-f", "-i"),
                   ('autoload -U compinit; compinit -u; eval "$(tessera completion zsh)"; '
                    'echo rea""dy\n', "ready"),
                   ("tessera stra\t", "tegies "), ("tessera dot digi\t", "ts "),
                   ("tessera put weig\t", "hts.npy "))

    def test_fish(self):
        if not shutil.which("fish"):
            self.skipTest("fish is not installed")
        script = self.run_cli("completion", "fish")
        for line, found in [("tessera stra", ["strategies"]), ("tessera dot digi", ["digits"]),
                            ("tessera put weig", ["weights.npy"])]:
            result = o.run("fish", "--no-config", "-c", f"{script}\ncomplete -C '{line}'",
                           cwd=self.folder, env=self.environment)
            self.assertEqual([l.split("\t")[0] for l in result.stdout.splitlines()], found, line)


class ManualTest(o.Case):
    """Every option of a help text is in a page."""

    def test_pages(self):
        cli, server = o.Program.cli, o.Program.path
        made = o.run(sys.executable, o.ROOT / "deploy/tools/manual.py", "--out", self.folder,
                     f"{cli}:1", f"{server}:8", timeout=600)
        self.assertEqual(made.returncode, 0, made.stderr)
        pages = {p.name: p.read_text() for p in self.folder.rglob("*.[18]")}
        for name, command in [("tessera.1", [cli]), ("tessera-put.1", [cli, "put"]),
                              ("tessera-bench-matmul.1", [cli, "bench", "matmul"]),
                              ("tessera-server.8", [server])]:
            text = o.run(*command, "--help").stdout
            options = set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.MULTILINE))
            self.assertGreater(len(options), 3)
            page = pages[name].replace("\\-", "-")
            terms = re.findall(r"^\.TP\n\.B (.*)\n(.*)$", page, re.MULTILINE)
            found = {option for term, _ in terms
                     for option in re.findall(r"--[\w-]+", term.split(" ")[0])}
            self.assertEqual(found, options, name)
            for term, description in terms:
                self.assertNotIn("  ", term)
                self.assertGreater(len(description), 3, term)
        for name, page in pages.items():  # CLI11 writes "UINT:INT in [0 - 9]" and "TEXT:{a,b}".
            self.assertNotRegex(page, r"\b(UINT|INT|TEXT|N|PID|LEVEL):(INT|POSITIVE|\{)", name)
        for name in ("window-sum", "topk", "bench-topk", "search"):
            self.assertIn(f"tessera-{name}.1", pages)
        self.assertNotIn("tessera-complete.1", pages)


if __name__ == "__main__":
    o.main()
