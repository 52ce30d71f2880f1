"""The gated delta rule: linear attention whose state decays and is corrected token by token."""
