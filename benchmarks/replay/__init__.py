"""Virtual-time replay: the real vLLM scheduler with our policies, on any GPU's step-time model, without a GPU."""
