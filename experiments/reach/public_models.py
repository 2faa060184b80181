"""The public models by name."""

from collections.abc import Callable
from importlib import import_module
from inspect import getmembers, isfunction

from experiments.reach.public_step import PublicStep

LIBRARIES = {
    "transformers": ("transformers_models", "transformers_pairs"),
    "haiku": ("haiku_models",),
    "equinox": ("equinox_models",),
    "diffrax": ("diffrax_models",),
    "distrax": ("distrax_models",),
    "jraph": ("jraph_models",),
    "penzai": ("penzai_models",),
    "flaxmodels": ("flaxmodels_models",),
    "numpyro": ("numpyro_models",),
    "flowjax": ("flowjax_models",),
    "keras": ("keras_models",),
    "optimistix": ("optimistix_models",),
    "ott": ("ott_models",),
    "diffusers": ("diffusers_models",),
    "equimo": ("equimo_models",),
    "e3nn": ("e3nn_models",),
    "flax": ("flax_models",),
    "optax": ("optax_optimizers",),
    "recipes": ("training_recipes",),
    "generative": ("generative_recipes",),
    "reinforcement": ("reinforcement_recipes",),
    "sequence": ("sequence_recipes",),
    "vision": ("vision_recipes",),
    "science": ("science_recipes",),
}
"""Modules of models by library."""


def models_of(library: str) -> dict[str, Callable[[], PublicStep]]:
    """Return the models of a library by name; the library has to be installed."""
    modules = [import_module(f"experiments.reach.libraries.{name}") for name in LIBRARIES[library]]
    return {
        f"{library}/{name}": function
        for module in modules
        for name, function in getmembers(module, isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def build_public_step(model: str) -> PublicStep:
    """Return the training step of a model, such as "transformers/gpt2"."""
    return models_of(model.partition("/")[0])[model]()


def model_names() -> list[str]:
    """Return the names of all models."""
    return [name for library in LIBRARIES for name in models_of(library)]
