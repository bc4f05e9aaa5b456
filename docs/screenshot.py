"""Photograph the report page of DeepSeek-V3 for the README: ``python docs/screenshot.py > docs/report.png``.

From its head to who sends to whom. Needs the extra ``browser`` and a Chromium. The page is the one that the site shows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

import from_code

WIDTH = 1440
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        from_code.write_report(from_code.DEEPSEEK_V3, page_file)
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(page_file.as_uri())
        end = page.locator("#matrix").bounding_box()
        assert end is not None, "the page shows who sends to whom"
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": end["y"] + end["height"] + 18}
        sys.stdout.buffer.write(page.screenshot(full_page=True, clip=clip))
        browser.close()


if __name__ == "__main__":
    main()
