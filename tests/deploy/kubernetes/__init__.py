"""The Kubernetes manifests as kubectl renders them: their schemas and their promises."""
