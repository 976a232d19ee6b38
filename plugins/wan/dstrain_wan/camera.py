"""Fun-Control-Camera: a first frame, and how the camera moves from it."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from torch import Tensor

from dstrain_wan import DOWNSCALE, model_fn

DIRECTIONS = (
    "Left",
    "Right",
    "Up",
    "Down",
    "LeftUp",
    "LeftDown",
    "RightUp",
    "RightDown",
)
SPEED = 1 / 54
"""Movement per frame by default."""
FOCAL = (0.532139961, 0.946026558)
"""Focal lengths of the published camera, in widths and heights of its image."""
ASPECT = 1280 / 720
"""Width by height of its image."""


class Camera(TypedDict):
    """Where the camera is, and what it sees."""

    camera: Tensor
    """(1, frames, 16), fp32: focal lengths and centre in pixels, then the 3x4 matrix from
    the camera to the first frame's.
    """


@versioned(1)
def encode_camera(
    camera_control_direction: str,
    num_frames: int,
    height: int,
    width: int,
    camera_control_speed: float = SPEED,
) -> Camera:
    """Return the camera of each frame, which moves at constant speed.

    A camera is described as in CameraCtrl (https://github.com/hehao13/CameraCtrl): in each
    frame the matrix to the camera changes by the speed, in its third column, which shears
    the view to the side.
    """
    across = ("Left" in camera_control_direction) - (
        "Right" in camera_control_direction
    )
    down = ("Up" in camera_control_direction) - ("Down" in camera_control_direction)
    moved = torch.arange(num_frames, dtype=torch.float64) * camera_control_speed
    to_camera = torch.eye(4, dtype=torch.float64).repeat(num_frames, 1, 1)
    to_camera[:, 0, 2] = across * moved
    to_camera[:, 1, 2] = down * moved
    from_camera = torch.linalg.inv(to_camera)[:, :3].flatten(1)
    focal_x, focal_y = FOCAL[0] * width, FOCAL[1] * height
    # The image of the published camera is cut to the video's aspect ratio.
    if width / height < ASPECT:
        focal_x = FOCAL[0] * height * ASPECT
    else:
        focal_y = FOCAL[1] * width / ASPECT
    seen = torch.tensor([focal_x, focal_y, width / 2, height / 2], dtype=torch.float64)
    camera = torch.cat([seen.expand(num_frames, 4), from_camera], dim=1)
    return {"camera": camera.float()[None]}


def rays(camera: Tensor, height: int, width: int) -> Tensor:
    """Return the Pluecker coordinates of each pixel's ray, with those of the four frames of
    a latent frame as channels: (batch, 24, latent frames, height, width).

    The first latent frame is one frame alone, four times.
    """
    batch, frames, _ = camera.shape
    focal, centre = camera[..., :2], camera[..., 2:4]
    matrix = camera[..., 4:].unflatten(-1, (3, 4))
    rows, columns = (
        torch.arange(side, device=camera.device) + 0.5 for side in (height, width)
    )
    x = (columns - centre[..., :1]) / focal[..., :1]
    y = (rows - centre[..., 1:]) / focal[..., 1:]
    x = x[:, :, None].expand(batch, frames, height, width)
    y = y[..., None].expand(batch, frames, height, width)
    seen = torch.nn.functional.normalize(torch.stack([x, y, torch.ones_like(x)]), dim=0)
    # In bf16, neighbouring pixels would look the same way.
    with torch.autocast(camera.device.type, enabled=False):
        directions = torch.einsum("bfij,jbfhw->bfihw", matrix[..., :3], seen)
    origins = matrix[..., 3, None, None].expand_as(directions)
    moments = torch.linalg.cross(origins, directions, dim=2)
    coordinates = torch.cat([moments, directions], dim=2)
    first = coordinates[:, :1].expand(-1, 3, -1, -1, -1)
    every = torch.cat([first, coordinates], dim=1).unflatten(1, (-1, 4))
    return every.permute(0, 3, 2, 1, 4, 5).flatten(1, 2)


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    camera: Tensor,
    first_latents: Tensor,
    clip_feature: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `model_fn.predict` does, of a first frame and a camera.

    Args:
        noisy_latents: (batch, channels, frames, h, w).
        timestep: fp32, 0 to 1000, (batch,).
        prompt_emb: (batch, tokens, channels).
        camera: (batch, frames, 16).
        first_latents: (batch, channels, 1, h, w); those of other frames are zeros.
        clip_feature: (batch, 257, channels): the first frame as the image encoder sees it.
        dit: The denoiser.
    """
    known = torch.zeros_like(noisy_latents)
    known[:, :, :1] = first_latents
    return _predict(
        noisy_latents, timestep, prompt_emb, camera, known, clip_feature, dit
    )


def predict_from_known(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    camera: Tensor,
    y: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, with y, (batch, 20, frames, h, w): which frames are known,
    and their latents; without an image encoder.
    """
    return _predict(noisy_latents, timestep, prompt_emb, camera, y, None, dit)


def _predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    camera: Tensor,
    known: Tensor,
    clip_feature: Tensor | None,
    dit: Any,
) -> Tensor:
    height, width = (DOWNSCALE * side for side in noisy_latents.shape[3:])
    return model_fn.denoise(
        torch.cat([noisy_latents, known], dim=1),
        timestep,
        prompt_emb,
        clip_feature,
        dit,
        rays=rays(camera, height, width).to(noisy_latents.dtype),
    )
