"""The entry point that vLLM calls in every process, whatever the user selected."""

import logging

logger = logging.getLogger("vllm.wmtp_vllm.plugin")


def register() -> None:
    """Let vLLM recognise the method name `windowed_mtp`; nothing else.

    vLLM does not guard this call: an exception here would kill every vLLM process on the machine,
    also those of users of other methods. So it never raises. What is wrong with this vLLM is raised
    where `windowed_mtp` is selected; where even that seam is gone, vLLM itself refuses the name, and
    `wmtp check` says why.
    """
    try:
        from wmtp_vllm import seams

        seams.apply_selection()
    except Exception as error:
        logger.debug("windowed_mtp is not available: %s", error)
