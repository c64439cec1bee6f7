"""The commands and programs of docs/http.md and of the Open Inference Protocol do what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import invoke
from serve_process import Serving, environment, python

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "http.md").read_text()
OPEN_INFERENCE = (ROOT / "docs" / "open-inference-protocol.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def curl(line: str, service: Serving) -> str:
    """Run a curl line of the documents on a service of our own."""
    line = re.sub(r"http://127\.0\.0\.1:\d+", service.url, line)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
    return done.stdout


def rounded(text: str) -> list[dict[str, object]]:
    return [{**each, "score": round(each["score"], 3)} for each in json.loads(text)]


@pytest.mark.xdist_group("transformers")
def test_curl_line_answers_what_the_page_says(infilling: Serving) -> None:
    [line] = [
        block
        for block in blocks(TEXT, "bash")
        if block.startswith("curl") and 'inputs"' in block and "stream" not in block
    ]
    [said] = blocks(TEXT, "json")
    assert rounded(curl(line, infilling)) == json.loads(said)


def test_stream_is_as_the_page_says(tmp_path: Path) -> None:
    [program] = [block for block in blocks(TEXT, "python") if "class Collatz" in block]
    [line] = [
        block for block in blocks(TEXT, "bash") if '"stream"' in block and "/predict" in block
    ]
    [said] = [block for block in blocks(TEXT, "text") if "[DONE]" in block]
    (tmp_path / "collatz.py").write_text(program)
    with Serving("collatz:Collatz", cwd=tmp_path) as service:
        assert curl(line, service) == said + "\n"


@pytest.mark.xdist_group("transformers")
def test_curl_line_of_the_readme_answers_what_it_says(infilling: Serving) -> None:
    [line] = [block for block in blocks(README, "bash") if "inputs" in block]
    said = next(block for block in blocks(README, "json") if "token_str" in block)
    assert rounded(curl(line, infilling)) == rounded(said)


@pytest.mark.long
def test_program_with_openais_client_answers_what_the_page_says() -> None:
    [program] = [block for block in blocks(TEXT, "python") if "openai" in block]
    [line] = [block for block in blocks(TEXT, "bash") if "response_format" in block]
    with Serving(str(ROOT / "example" / "models" / "text_generation")) as service:
        program = program.replace("http://127.0.0.1:8000", service.url)
        assert python("-c", program).stdout == " you.\n"
        [choice] = json.loads(curl(line, service))["choices"]
        assert re.fullmatch(r"[a-z ]+\.", choice["message"]["content"])
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2


@pytest.mark.xdist_group("transformers")
def test_program_with_hugging_faces_client_answers_what_the_page_says(infilling: Serving) -> None:
    [program] = [block for block in blocks(TEXT, "python") if "InferenceClient" in block]
    program = program.replace("http://127.0.0.1:8000", infilling.url)
    assert python("-c", program).stdout == "you\n"


@pytest.mark.long
def test_curl_lines_send_files(tmp_path: Path) -> None:
    from PIL import Image

    [lines] = [block for block in blocks(TEXT, "bash") if "@cat.png" in block]
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    with Serving("served_models:kinds") as service:
        for line in lines.replace("-F 'parameters={\"top_k\": 2}'", "").splitlines():
            told = curl(line.replace("@cat.png", f"@{tmp_path / 'cat.png'}"), service)
            assert told.startswith("\"bytes b'\\\\x89PNG"), line


@pytest.mark.long
def test_program_with_a_pipeline_alone_answers_what_the_page_says(tmp_path: Path) -> None:
    [program] = [block for block in blocks(TEXT, "python") if "PipelineModel" in block]
    (tmp_path / "program.py").write_text(program)
    assert python(str(tmp_path / "program.py")).stdout == "you\n"


def help_of(command: str) -> str:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    return done.output


def test_options_of_the_example_file_are_those_of_serve() -> None:
    [table] = blocks(TEXT, "toml")
    text = help_of("serve")
    for name in tomllib.loads(table)["serve"].keys() - {"model"}:
        assert f"--{name} " in text


def test_options_that_are_named_are_there() -> None:
    texts = help_of("serve"), help_of("worker")
    ours = re.sub(r"^curl .*", "", TEXT, flags=re.MULTILINE)
    for option in set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", ours)):
        assert any(option in text for text in texts), option


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    model, _ = blocks(OPEN_INFERENCE, "python")
    (folder / "scaling.py").write_text(model)
    path = environment()["PYTHONPATH"]
    with Serving("scaling:Scaled", "--grpc-port", "0", PYTHONPATH=f"{folder}:{path}") as service:
        yield service


@pytest.mark.xdist_group("open-inference-docs")
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_client_of_the_open_inference_protocol(scaling: Serving, kind: str) -> None:
    _, program = blocks(OPEN_INFERENCE, "python")
    found = re.search(r"gRPC on (\S+)", scaling.line)
    assert found is not None
    address = found[1] if kind == "grpc" else scaling.url.removeprefix("http://")
    program = program.replace("127.0.0.1:8000", address).replace("http as", f"{kind} as")
    assert python("-c", program).stdout == "[[2. 4. 6.]]\n"
