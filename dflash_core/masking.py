"""Which tokens of a conversation the target would have generated.

Two texts say where an assistant turn lies: the conversation up to the turn with the generation prompt, and
up to the turn and including it. Text is never searched for markers, which users may write too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from operator import itemgetter
from typing import NamedTuple

from dflash_core.chat import Chat, Unrenderable
from dflash_core.corpus.rows import Row

# Below this many turns, two renderings of the whole conversation for each are cheaper than windows.
_MANY_TURNS = 8


class Turn(NamedTuple):
    """A supervised turn: its place in the row's messages, and its characters in a rendering.

    `begin` is the end of the generation prompt, `end` the end of what the template prints for the turn.
    `ended` is False for an answer that was cut by length; `end` is then the end of what the target wrote,
    because the end of the turn comes from the template and is left out of the mask.
    """

    place: int
    begin: int
    end: int
    ended: bool = True


class Rendering(NamedTuple):
    """A text that becomes a sample, and its supervised turns in order; the last one ends the text."""

    text: str
    turns: list[Turn]


class Sample(NamedTuple):
    """Token ids, the spans (start, stop) of them that the target would have generated, and their turns."""

    input_ids: list[int]
    spans: list[tuple[int, int]]
    turns: list[Turn]


# --- texts -------------------------------------------------------------------------------------


def renderings(chat: Chat, row: Row) -> tuple[list[Rendering], int]:
    """The texts that together show each assistant turn as the target was served it.

    A turn lies in the text of a later one when that text begins with everything up to and including the
    turn. Templates that never rewrite history thus give one text for the whole conversation; one that
    does (Qwen3 drops earlier reasoning) gives a text for each turn it prints differently later.

    Returns:
        The renderings in the order of their last turns, and how many turns cannot be supervised because
        the template prints them otherwise than its own generation prompt begins.

    Raises:
        Unrenderable: the template cannot print the conversation, or leaves a tool call out.
    """
    views = _Views(chat, row)
    found = views.by_windows() if len(views.places) >= _MANY_TURNS else None
    found, unsupervised = (found, 0) if found else views.turn_by_turn()
    if found and row.metadata.get("cut_by_length"):
        text, turns = found[-1]
        if turns[-1].place == views.places[-1]:
            found[-1] = Rendering(text, [*turns[:-1], _cut_turn(chat, row, turns[-1])])
    return found, unsupervised


def left_out(row: Row, found: list[Rendering], key: str) -> int:
    """Turns of which the recorded `content` or `reasoning_content` is not in the text that they are learned from."""
    return sum(
        (row.messages[turn.place].get(key) or "").strip() not in text[turn.begin : turn.end]
        for text, turns in found
        for turn in turns
    )


def _cut_turn(chat: Chat, row: Row, turn: Turn) -> Turn:
    """The turn of an answer that the target did not end; regeneration noted how much it wrote."""
    written = row.metadata.get("written_characters")
    end = turn.end - len(chat.after_answer) if written is None else turn.begin + written
    return turn._replace(end=min(end, turn.end), ended=False)


class _Views:
    """A conversation as it was printed at each of its assistant turns."""

    def __init__(self, chat: Chat, row: Row) -> None:
        self.row, self._chat = row, chat
        self.places = [
            i for i, message in enumerate(row.messages) if message["role"] == "assistant"
        ]
        answered = row.messages[: self.places[-1] + 1] if self.places else []
        self._given = chat.given(answered, row.tools) if answered else {}
        self._texts: dict[tuple[int, int, bool], str] = {}

    def turn_by_turn(self) -> tuple[list[Rendering], int]:
        """Renders the whole conversation twice for each turn and compares; see `renderings`."""
        prompts = [self._prompt(0, place) for place in self.places]
        fulls = [self._behind(p, place) for p, place in zip(prompts, self.places, strict=True)]
        for place, prompt, full in zip(self.places, prompts, fulls, strict=True):
            self._require_calls(place, full.removeprefix(prompt))
        servable = [k for k in range(len(prompts)) if fulls[k].startswith(prompts[k])]
        uncovered, found = set(servable), []
        for last in reversed(servable):
            if last not in uncovered:
                continue
            inside = [
                k for k in sorted(uncovered) if k <= last and fulls[last].startswith(fulls[k])
            ]
            uncovered -= set(inside)
            turns = [Turn(self.places[k], len(prompts[k]), len(fulls[k])) for k in inside]
            found.append(Rendering(fulls[last], turns))
        return found[::-1], len(prompts) - len(servable)

    def by_windows(self) -> list[Rendering] | None:
        """The renderings from a few short texts a turn, where `turn_by_turn` takes quadratic time.

        The last and the first turn of each text are compared as there. Between them a turn is printed in a
        window: the conversation's beginning, the turn before and what came since. What the windows print
        must join to exactly the text. The one thing taken on trust is that no template prints a turn
        otherwise for what lies between the beginning and the turn before it.

        Returns:
            None where a turn is not printed as its own generation prompt begins, or windows are of no use.
        """
        found, last = [], len(self.places) - 1
        while last >= 0:
            place = self.places[last]
            prompt, text = self._prompt(0, place), self._full(0, place)
            if not text.startswith(prompt):
                return None
            self._require_calls(place, text[len(prompt) :])
            turns = [Turn(place, len(prompt), len(text))]
            while len(turns) <= last and (turn := self._turn_before(turns[0], text)):
                turns.insert(0, turn)
            prompt = self._prompt(0, turns[0].place)
            if len(prompt) != turns[0].begin or not text.startswith(prompt):
                return None
            found.append(Rendering(text, turns))
            last -= len(turns)
            if len(found) == 2 and max(len(it.turns) for it in found) == 1 <= last:
                return None  # each turn rewrites what was before: windows would only cost
        return found[::-1]

    def _behind(self, prompt: str, place: int) -> str:
        """The text up to and including the turn at `place`; it begins with `prompt` where that can be.

        gpt-oss prints the reasoning of a call until a final answer follows, so the text that ends with that
        answer does not begin as its prompt did. The answer is then taken from texts without such reasoning.
        """
        text = self._full(0, place)
        if text.startswith(prompt):
            return text
        before = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            for message in self.row.messages[:place]
        ]
        messages, tools = [*before, self.row.messages[place]], self.row.tools
        shorter = self._chat.render(before, tools, prompt=True)
        answer = _added(shorter, self._chat.render(messages, tools, prompt=False))
        return text if answer is None else prompt + answer

    def _turn_before(self, after: Turn, text: str) -> Turn | None:
        """The assistant turn before `after`, or None where `text` holds it in another form."""
        index = self.places.index(after.place) - 1
        place, since = self.places[index], self.places[max(index - 1, 0)]
        answer = _added(self._prompt(since, place), self._full(since, place))
        between = _added(self._full(place, place), self._prompt(place, after.place))
        if answer is None or between is None:
            return None
        self._require_calls(place, answer)
        end = after.begin - len(between)
        begin = end - len(answer)
        if begin < 0 or text[begin : after.begin] != answer + between:
            return None
        return Turn(place, begin, end)

    def _prompt(self, since: int, place: int) -> str:
        """The prompt of the turn at `place`, with the messages of the beginning and from `since` on."""
        return self._render(since, place, True)

    def _full(self, since: int, place: int) -> str:
        """The turn at `place` after those messages."""
        return self._render(since, place + 1, False)

    def _render(self, since: int, stop: int, prompt: bool) -> str:
        """Each text once: neighbouring windows begin with the same, and both ways begin with whole ones."""
        first = self.places[0]
        key = (max(since, first), stop, prompt)
        if key not in self._texts:
            messages = self._given["messages"]
            window = [*messages[:first], *messages[key[0] : stop]]
            self._texts[key] = self._chat.print(self._given, window, prompt=prompt)
        return self._texts[key]

    def _require_calls(self, place: int, printed: str) -> None:
        message = self.row.messages[place]
        calls = message.get("tool_calls") or ()
        times = Counter(call["function"]["name"] for call in calls)
        # Names alone would not do: text and arguments may hold them, too.
        left_out = bool(calls) and self._chat.leaves_out_calls(message, self.row.tools)
        if left_out or any(printed.count(name) < count for name, count in times.items()):
            raise Unrenderable("tool calls are left out")


def _added(text: str, longer: str) -> str | None:
    """What `longer` has behind `text`; None when it begins otherwise."""
    return longer[len(text) :] if longer.startswith(text) else None


# --- tokens ------------------------------------------------------------------------------------


def samples_of(
    chat: Chat, rendering: Rendering, ids: list[int], offsets: list[tuple[int, int]]
) -> list[Sample]:
    """Token spans of the turns of an encoded rendering.

    Nearly always one sample. Where the tokenizer merges the end of a prompt with the beginning of its
    answer, the prompt's tokens are no prefix of `ids`; such a turn becomes a sample of its own, made of
    the prompt's tokens and the answer's as the server would have had them.

    Args:
        chat: the template and tokenizer.
        rendering: the text.
        ids: its tokens.
        offsets: for each token, the characters (start, end) it stands for.
    """
    samples, whole = [], Sample(ids, [], [])
    for turn in rendering.turns:
        first = bisect_left(offsets, turn.begin, key=itemgetter(0))
        if _is_border(chat, rendering.text, ids, offsets, first, turn.begin):
            stop = bisect_left(offsets, turn.end, key=itemgetter(0))
            while not turn.ended and stop > first and offsets[stop - 1][1] > turn.end:
                stop -= 1
            whole.spans.append((first, _stop(chat, ids, first, stop) if turn.ended else stop))
            whole.turns.append(turn)
            continue
        prompt = chat.encode(rendering.text[: turn.begin])
        alone = prompt + chat.encode(rendering.text[turn.begin : turn.end])
        stop = _stop(chat, alone, len(prompt), len(alone)) if turn.ended else len(alone)
        samples.append(Sample(alone, [(len(prompt), stop)], [turn]))
    return [*samples, whole] if whole.spans else samples


def _stop(chat: Chat, ids: list[int], first: int, stop: int) -> int:
    """Behind the last end-of-turn token before `stop`; one in the answer's own text is earlier."""
    while stop > first and ids[stop - 1] not in chat.ends_of_turn:
        stop -= 1
    return stop


def _is_border(
    chat: Chat, text: str, ids: list[int], offsets: list[tuple[int, int]], first: int, begin: int
) -> bool:
    """Whether the tokens before `first` are those of text[:begin] alone.

    Encoding that text anew would cost a pass for each turn. Added tokens cut a text into pieces that are
    encoded apart, so the piece from the last of them to the border decides.
    """
    if first == 0 or offsets[first - 1][1] > begin:
        return begin == 0
    since = first - 1
    while since > 0 and ids[since] not in chat.separators:
        since -= 1
    return ids[since:first] == chat.encode(text[offsets[since][0] : begin])


def survives(chat: Chat, rendering: Rendering, sample: Sample, spoken: list[str]) -> bool:
    """Whether the supervised tokens say exactly what the template printed for their turns.

    Up to the tokenizer's own normalization of Unicode, which the server's prompt goes through as well;
    behind an end-of-turn token there may be white space.

    Args:
        chat: the template and tokenizer.
        rendering: what was encoded.
        sample: one of its samples.
        spoken: the decoded tokens of each span.
    """
    for turn, text in zip(sample.turns, spoken, strict=True):
        printed = rendering.text[turn.begin : turn.end]
        # Decoders of SentencePiece vocabularies leave out a space at the very beginning.
        forms = (printed, chat.normalized(printed), printed.removeprefix(" "))
        rests = [rest for form in forms if (rest := _added(text, form)) is not None]
        if not rests or (turn.ended and rests[0].strip()):
            return False
    return True
