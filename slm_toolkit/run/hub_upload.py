"""Upload of the saved model to the hub, for --push_to_hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

from slm_toolkit.base.errors import first_line
from slm_toolkit.config.run_config import RunConfig


def upload_model(folder: Path, config: RunConfig, *, run_name: str) -> str:
    """Create the repository if it does not exist, upload the files of `folder`, and return its URL.

    Raises ValueError, with the command for a later upload, if the hub refuses or can't be reached.
    """
    name = config.hub_model_id or run_name
    try:
        api = HfApi()
        repository = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=f"Model of the run {run_name}"
        )
    except (HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError, OSError) as error:
        raise ValueError(
            f"can't upload the model to {name}: {first_line(error)}\n"
            f"hint: the model is saved; after `hf auth login`: hf upload {name} {folder}"
        ) from None
    return str(repository)
