"""The paper: every figure from one command, with published numbers beside ours."""
