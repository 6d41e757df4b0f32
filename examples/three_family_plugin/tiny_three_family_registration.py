"""The plugin that tells vLLM about the model, in every process that vLLM starts."""


def register() -> None:
    from vllm import ModelRegistry

    # By name: the class is imported only where the model is really needed.
    ModelRegistry.register_model(
        "TinyThreeFamilyForCausalLM", "tiny_three_family:TinyThreeFamilyForCausalLM"
    )
