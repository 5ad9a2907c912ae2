"""The container files: what they promise (no engine needed), and the real stack."""
