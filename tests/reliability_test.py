#!/usr/bin/env python3
"""Checks that every test, file and name that a document names exists, and that every limit of the
server has a line in docs/reliability.md."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def tables():
    """Yields the rows of each table as lists of cells. The first row has the titles."""
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip("|").split(" | ")]
                for row in table.splitlines()]
        yield rows[:1] + rows[2:]


def suite(word):
    """Returns the text of the suite of this name, or None."""
    stem = word.removeprefix("tests/")
    for name in (stem, f"{stem}.py", f"{stem}.cc", f"{stem}/{stem}.cc"):
        path = ROOT / "tests" / name
        if path.is_file():
            return path.read_text()
    return None


class ReliabilityTest(unittest.TestCase):
    def test_tests_exist(self):
        count = 0
        for titles, *rows in tables():
            if titles[-1] != "shown by":
                continue
            for row in rows:
                text = None
                for word in re.findall(r"`([\w/.]+)`", row[-1]):
                    with self.subTest(row=row[0], word=word):
                        found = suite(word)
                        if found is not None:
                            text = found
                        else:
                            self.assertTrue(text and re.search(rf"\b{word}\b", text))
                        count += 1
                self.assertTrue(text is not None or "every suite" in row[-1], row)
        self.assertGreater(count, 100)

    def test_tests_that_other_documents_name_exist(self):
        tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
        cases = set(re.findall(r"def (test_\w+)", tests))
        built = "".join((ROOT / folder / "CMakeLists.txt").read_text()
                        for folder in (".", "tests", "kernels/bench"))
        for document in [path for folder in ("*.md", "docs/*.md", "deploy/**/*.md")
                         for path in ROOT.glob(folder)]:
            for quoted in re.findall(r"`([^`\n]+)`", document.read_text()):
                for word in re.findall(r"\btest_\w+|\b\w+_test\b", quoted):
                    with self.subTest(document=document.name, word=word):
                        self.assertTrue(word in cases or suite(word) is not None or word in built)

    def test_files_and_names_of_the_design_exist(self):
        """If a row of a table names files and names, each name is in one of these files."""
        path = r"(?:client|deploy|docs|kernels|proto|server|tests)/[\w./-]*\.\w+"
        names = 0
        for document in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "design").glob("*.md")]:
            text = document.read_text()
            for file in set(re.findall(rf"(?<![\w./-]){path}\b", text)):
                with self.subTest(document=document.name, file=file):
                    self.assertTrue((ROOT / file).is_file())
            for row in re.findall(r"^\|.*", text, re.MULTILINE):
                quoted = re.findall(r"`([^`]+)`", row)
                files = [word for word in quoted if re.fullmatch(path, word)]
                code = "".join((ROOT / file).read_text() for file in files)
                for word in quoted if files and document.parent != ROOT else ():
                    name = re.fullmatch(r"(?:\w+::)*(~?\w+)", word)
                    if name is not None:
                        names += 1
                        with self.subTest(document=document.name, row=row, name=word):
                            self.assertTrue(re.search(rf"(?<!\w){name[1]}\b", code))
        self.assertGreater(names, 100)

    def test_every_limit_has_its_line(self):
        flags = re.findall(r'Add\w+\(\s*app,\s*"([\w-]+)"',
                           (ROOT / "server" / "options.cc").read_text())
        limits = {f"--{flag}" for flag in flags
                  if re.fullmatch(r"max-.*|.*-(limit|memory|ttl|timeout)|queue|workers", flag)}
        self.assertGreater(len(limits), 10)
        (rows,) = [rows for titles, *rows in tables() if titles[0] == "limit"]
        self.assertEqual(limits - {word for row in rows
                                   for word in re.findall(r"--[\w-]+", row[0])}, set())


if __name__ == "__main__":
    unittest.main()
