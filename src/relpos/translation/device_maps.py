"""Where the parts of a model are loaded to: device maps of transformers and accelerate."""

from typing import Any

from torch import nn


def for_accelerate(device_map: dict[str, Any], model: nn.Module, *, shared: dict[str, str]) -> dict[str, Any]:
    """The device map as accelerate can follow it.

    accelerate cannot load a shared weight if one of its modules is on disk and another in memory: all of them
    are then put in memory. Nor can it load a part in memory that contains a part on disk: the outer part is
    then replaced by its children.

    Args:
        device_map: the device of each part, by the part's name; "disk" for weights that stay in files.
        model: a model with the parts' names; its weights are not read.
        shared: names of weights, each with the name whose weight it shares.
    """
    device_map = dict(device_map)
    modules = sorted({name.rpartition(".")[0] for pair in shared.items() for name in pair})
    devices = {name: device_map[part] for name in modules if (part := _part(name, device_map)) is not None}
    in_memory = [device for device in devices.values() if device != "disk"]
    if in_memory:
        device_map |= {name: in_memory[0] for name, device in devices.items() if device == "disk"}
    while (outer := _outer_part(device_map, model)) is not None:
        prefix = f"{outer}." if outer else ""
        children = [prefix + child for child, _ in model.get_submodule(outer).named_children()]
        device_map = dict.fromkeys(children, device_map.pop(outer)) | device_map
    return device_map


def _part(module: str, device_map: dict[str, Any]) -> str | None:
    """The name in `device_map` of the smallest part that holds the module."""
    return max((part for part in device_map if _holds(part, module)), key=len, default=None)


def _outer_part(device_map: dict[str, Any], model: nn.Module) -> str | None:
    """The name of a part that holds another part and nothing but modules."""
    names = {name for name, _ in model.named_modules()}
    for part in device_map:
        is_outer = any(part != other and _holds(part, other) for other in device_map)
        if is_outer and part in names and not [*model.get_submodule(part).parameters(recurse=False)]:
            return part
    return None


def _holds(part: str, name: str) -> bool:
    return part == "" or f"{name}.".startswith(f"{part}.")
