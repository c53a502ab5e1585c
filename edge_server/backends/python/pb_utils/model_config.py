"""`pb_utils.ModelConfig`: the configuration that `auto_complete_config` may complete. Texts are
Triton's."""

from __future__ import annotations

import json
from typing import Any

_PROPERTIES = {
    "input": ("name", "data_type", "dims", "optional"),
    "output": ("name", "data_type", "dims"),
}


class AutoCompleteConfig:
    """`pb_utils.ModelConfig`: a configuration as a dict, in Triton's JSON form, with Triton's rules
    for its completion."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the batch size.

        Raises:
            ValueError: the configuration has a larger one.
        """
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where} specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching.

        Raises:
            ValueError: the configuration has another scheduler.
        """
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"{self._where[3:]} tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Add or check an input.

        Raises:
            ValueError: the tensor is incomplete, or contradicts the configuration.
        """
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Add or check an output.

        Raises:
            ValueError: the tensor is incomplete, or contradicts the configuration.
        """
        self._add("output", tensor)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set the transaction policy.

        Raises:
            ValueError: the configuration has another policy.
        """
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property {self._where} contains property other than "
                "'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    @property
    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._name}'"

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        *names, last = _PROPERTIES[kind]
        if set(tensor) - {*names, last}:
            listed = ", ".join(f"'{name}'" for name in names)
            raise ValueError(
                f"{kind} '{tensor.get('name', '')}' {self._where} contains property other than "
                f"{listed} and '{last}'."
            )
        if "name" not in tensor:
            raise ValueError(f"{kind} {self._where} is missing 'name' property.")
        for required in ("data_type", "dims"):
            if required not in tensor:
                raise ValueError(
                    f"{kind} '{tensor['name']}' {self._where} is missing '{required}' property."
                )
        for configured in self._model_config.setdefault(kind, []):
            if configured["name"] == tensor["name"]:
                self._agree(kind, configured, tensor)
                return
        self._model_config[kind].append(dict(tensor))

    def _agree(self, kind: str, configured: dict[str, Any], tensor: dict[str, Any]) -> None:
        where = f"model '{self._name}', tensor '{tensor['name']}': the model expects"
        datatype = configured.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {datatype} "
                f"for {kind} '{tensor['name']}', model provides {tensor['data_type']}"
            )
        dims = [int(dim) for dim in configured.get("dims", [])]
        if dims and dims != list(tensor["dims"]):
            raise ValueError(
                f"{where} dims {tensor['dims']} but the model configuration specifies dims {dims}"
            )
        optional = configured.get("optional", False)
        if "optional" in tensor and optional and optional != tensor["optional"]:
            raise ValueError(
                f"{where} optional {tensor['optional']} but the model configuration specifies "
                f"optional {optional}"
            )
        configured.update(tensor)
