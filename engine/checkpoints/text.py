"""The text model of a checkpoint that sees or hears too: its configuration, its weights' names, marks of what it sees.

Where transformers has a causal model for the text configuration, that alone is made. Where it has none, the whole
model's class is, without the parts that see or hear. Either way their weights are not read and take no memory. Prompts
are texts; one with the mark of an image is refused.

Not here: reading a configuration (`engine/checkpoints/load.py`).
"""

import copy
from functools import cache
from typing import Any

# Names of a text model's weights within a composite, and in its own class.
NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
SENSES = ("image", "video", "audio")
OUTER = ("tie_word_embeddings", "quantization_config")  # which a composite says for its text model


def text_part(config: Any) -> Any:
    """The configuration of the text model, where a composite's can stand alone; else the configuration itself."""
    from transformers import AutoModelForCausalLM

    if getattr(config, "vision_config", None) is None or hasattr(config, "auto_map"):
        return config
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # it has several
        return config
    if text is config or type(text) not in AutoModelForCausalLM._model_mapping:
        return config
    text = copy.deepcopy(text)
    for name in OUTER:
        if hasattr(config, name):
            setattr(text, name, getattr(config, name))
    return text


def how_to_read(config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the text model of a checkpoint with this configuration."""
    text = text_part(config)
    return {} if text is config else {"config": text, "key_mapping": NAMES}


@cache
def without_senses(whole: Any) -> Any:
    """The class of a whole model whose inner model has its decoder alone."""

    class TextOnly(whole):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            decoder = self.get_decoder()
            for name, part in self.model.named_children():
                if part is not decoder and not any(inner is decoder for inner in part.modules()):
                    setattr(self.model, name, None)

        @classmethod
        def from_config(cls, config: Any, trust_remote_code: bool = False, **how: Any) -> Any:
            """Make the model as an Auto class does; no code comes with a class of transformers."""
            return cls._from_config(config, **{key: value for key, value in how.items() if value is not None})

    TextOnly.__name__, TextOnly.__qualname__, TextOnly.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return TextOnly


def marks(config: Any) -> frozenset[int]:
    """Tokens that stand for an image, a video or a sound."""
    names = (f"{sense}_token_{end}" for sense in SENSES for end in ("id", "index"))
    return frozenset(n for name in names if isinstance(n := getattr(config, name, None), int))
