"""What Schemathesis is kept from asking: what takes the engine down with native MTP too, on V1.

The log probabilities of chosen tokens; vLLM's rejection sampler gives those of the last token for them
alone, and of the others for the whole vocabulary.
"""

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict):
        case.body.pop("logprob_token_ids", None)
