"""The training script refuses text under another vocabulary; runs that already read it as bytes resume."""

import json
import sys
from pathlib import Path

from conftest import SMALL_LLAMA, record_under, run

_AS_BEFORE = """
import sys
from slm_toolkit import train
from slm_toolkit.run import setup
setup.check_tokenizer = lambda config, spec: None
train.main(sys.argv[1:])
"""
"a run of an older version, which trained on bytes unasked"


def test_the_script_refuses_bytes_unless_asked_and_an_earlier_run_of_bytes_resumes(tmp_path: Path) -> None:
    shape = {**SMALL_LLAMA, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "a.md").write_text("words " * 200)
    common = ("--model", "config.json", "--dataset", "a.md", "--seq_len", "16", "--save_steps", "1")

    def trained(name: str, *flags: str, start: tuple[str, ...] = ("-m", "slm_toolkit.train")) -> tuple:
        words = (*common, "--run_name", name, "--output_dir", str(tmp_path), *flags)
        return run(sys.executable, *start, *words, cwd=tmp_path, warm=True)

    for resume in ((), ("--resume_from_checkpoint", "auto")):
        refused = trained("refused", "--max_steps", "1", *resume)
        assert refused.code == 2
        message = "error: --dataset a.md: model config.json has 1,000 tokens, but no tokenizer\nhint: "
        assert message.replace("config.json", tmp_path.name) in refused.err
        assert "Traceback" not in refused.err
    old = trained("old", "--max_steps", "1", start=("-c", _AS_BEFORE))
    assert old.code == 0, old.err
    again = trained("old", "--max_steps", "2", "--resume_from_checkpoint", "latest")
    assert again.code == 0, again.err
    assert record_under(tmp_path / "old")["tokenizer"] == "bytes"
    asked = trained("asked", "--max_steps", "1", "--tokenizer_name", "byte")
    assert asked.code == 0, asked.err
