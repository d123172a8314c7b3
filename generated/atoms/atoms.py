"""The energy of atoms and the forces on them, its negative gradient: what a potential is trained on
(Behler, Parrinello 2007; Schuett et al. 2017)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Potential(nn.Module):
    """Species (batch, atoms) and positions (batch, atoms, 3) to energies (batch,) and forces of the
    positions' shape. A pair of atoms adds what their distance, in Gaussians, says of them."""

    def __init__(self, species=4, width=32, gaussians=16, cutoff=5.0):
        super().__init__()
        self.embedding = nn.Embedding(species, width)
        self.filter = nn.Sequential(
            nn.Linear(gaussians, width), nn.Softplus(), nn.Linear(width, width)
        )
        self.energy = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0.0, cutoff, gaussians))

    def forward(self, species, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energies = self.energies(species, positions)
            (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -gradient

    def energies(self, species, positions):
        """By structure; smooth, so that forces have a gradient too."""
        pairs = positions[:, :, None] - positions[:, None, :]
        distances = (pairs.square().sum(dim=-1) + 1e-6).sqrt()
        gaussians = torch.exp(-(distances[..., None] - self.centers).square())
        features = self.embedding(species)
        filters = self.filter(gaussians) * (distances[..., None] > 0.01)  # none for an atom itself
        messages = torch.einsum("bijd,bjd->bid", filters, features)
        return self.energy(features + messages).sum(dim=(1, 2))


def build(**options):
    """A potential."""
    return Potential(**options)


def loss(output, energy, force):
    """Errors of energies and forces, squared."""
    energies, forces = output
    return F.mse_loss(energies, energy) + 10 * F.mse_loss(forces, force)
