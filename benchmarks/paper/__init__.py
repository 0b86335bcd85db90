"""The paper's figures, re-run in virtual time beside what the paper printed."""
