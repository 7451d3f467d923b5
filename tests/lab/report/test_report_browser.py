"""The page in a real browser, where there is one."""

import html
import re
import shutil
import subprocess

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSER = BROWSER or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_chromium_shows_the_table_s_cells(comparison, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--disable-dev-shm-usage", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *flags, comparison[1].as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    dom = done.stdout.decode()
    table = re.search(r'<table id="headline">.*?</table>', dom, re.DOTALL).group()
    cells = [
        html.unescape(re.sub(r"<[^>]*>", "", cell)).strip()
        for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", table, re.DOTALL)
    ]
    for cell in ("Implicit", "JFB", "NPG", "GDEQ", "2.16×", "1.71×", "26.4 s", "≤ 21"):
        assert cell in cells
    assert dom.count("<img") == 7
    assert "Four gradients</h1>" in dom
