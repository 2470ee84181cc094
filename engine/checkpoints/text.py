"""The text model of a checkpoint that sees or hears too: its configuration, its weights' names, marks of what it sees.

Where transformers has a causal model for the text configuration, that alone is made: other weights are not read, and
take no memory. Where it has none the whole model is loaded (`engine/checkpoints/kinds.py`). Prompts are texts either
way; one with the mark of an image is refused.

Not here: reading a configuration (`engine/checkpoints/load.py`).
"""

import copy
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


def marks(config: Any) -> frozenset[int]:
    """Tokens that stand for an image, a video or a sound."""
    names = (f"{sense}_token_{end}" for sense in SENSES for end in ("id", "index"))
    return frozenset(n for name in names if isinstance(n := getattr(config, name, None), int))
