"""An LSTM layer for series of different lengths."""

import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class PackedLSTM(nn.Module):
    """Padded series (batch, time, width), their lengths (batch,) and a state to begin in, hidden
    and cell values (batch, width); it returns the state after each series' last element, too."""

    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x, lengths, state):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, (hidden, cell) = self.lstm(packed, (state[0][None], state[1][None]))
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return x, (hidden[0], cell[0])
