"""AWS infrastructure: ``cdk deploy`` from the repository's folder. docs/deploy.md says how."""
