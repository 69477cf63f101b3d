"""Conversations and preference pairs in the rows of data files: the fields that a row may have, and what of them a chat
template is given, which is what transformers' apply_chat_template(messages, tools=…, documents=…) gives to it."""
import json

from errors import DataError, first_line, option

# Sets of fields of a row; the first set that it has counts.
SHAPES = (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("messages",), ("conversations",),
          ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("text",))
RESPONSES = ("chosen", "rejected")
# What a template is given besides messages: lists of objects, and variables by name.
LISTS, VARIABLES = ("tools", "documents"), "chat_template_kwargs"
OF_TEMPLATE = (*LISTS, VARIABLES)
MORE_FIELDS = {"conversations": ("system", *OF_TEMPLATE), "instruction": ("input", *OF_TEMPLATE), "text": ()}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
# ShareGPT's names of roles.
SPEAKERS = {**{role: role for role in ROLES}, "human": "user", "observation": "tool",
            **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first or the second
RESPONSE = ("content", "tool_calls", "function_call", *REASONING)  # an assistant turn has one of them at least
LABELS = ("role", "type")  # keys of words that are no text


def shape_of(where, names):
    """The first of SHAPES whose fields are all there."""
    for shape in SHAPES:
        if set(shape) <= set(names):
            return shape
    accepted = ", ".join(" and ".join(f"'{name}'" for name in shape) for shape in SHAPES)
    raise DataError(f"{where}: has the fields {', '.join(map(repr, names)) or '(none)'}; give one of {accepted} "
                    "(docs/use/data.md)")


def fields_of(shape):
    """The fields of a row that are read."""
    more = MORE_FIELDS["conversations"] if is_pair(shape) else MORE_FIELDS.get(shape[0], OF_TEMPLATE)
    return (*shape, *more)


def is_pair(shape):
    return shape[-2:] == RESPONSES


def utf8(text):
    """JSON can hold half a surrogate pair, which is not a character and cannot be encoded; so can a file name that is
    not UTF-8."""
    return text.encode("utf-8", "replace")


def typed(where, name, value, wanted, words):
    if not isinstance(value, wanted):
        raise DataError(f"{where}: '{name}' holds {type(value).__name__}, not {words}")
    return value


def string_of(where, name, value):
    return typed(where, name, value, str, "a string")


def document_of_row(where, record, shape):
    """The Conversation or Pair of a row. record: the fields that it was made of."""
    if is_pair(shape):
        document = Pair(where, record)
    else:
        document = Conversation(where, *messages_of_row(where, record, shape), of_template(where, record))
        document.is_instruction = "instruction" in shape
    document.record = {name: record[name] for name in fields_of(shape) if name in record}
    return document


class Conversation:
    """A training example: messages, of which the tokens of the assistant's are loss tokens, but not those of the first
    `prompt` messages. more: what a template is given besides. len() is the number of bytes of text."""
    kind = "conversations"
    is_instruction = False

    def __init__(self, where, messages, prompt, more):
        self.messages, self.more = messages, more
        inputs = [i for i, message in enumerate(messages) if is_input(f"{where}: message {i + 1}", message, i < prompt)]
        self.trained = [message for i, message in enumerate(messages) if i not in inputs]
        try:
            self.texts = list(strings([self.messages, self.more]))
            self.size = sum(len(utf8(text)) for text in self.texts)
            self.json = to_json({"messages": self.messages, "inputs": inputs, **self.more})
        except (ValueError, TypeError, RecursionError) as e:
            raise DataError(f"{where}: holds a value that a template cannot be given ({first_line(e)})") from None

    def __len__(self):
        return self.size

    def learns(self):
        return any(message["role"] == "assistant" and any(map(message.get, RESPONSE)) for message in self.trained)

    def encoded(self, has_template):
        """What Encoder.encode() takes. Without a template a conversation has texts only, and an empty line separates an
        instruction from its output."""
        if has_template:
            return self.json
        for part in (self.more, *self.messages):
            for name in (*OF_TEMPLATE, *RESPONSE[1:], "name"):
                if part.get(name):
                    raise DataError(f"'{name}' of a conversation needs a chat template, which writes it; give "
                                    f"{option('tokenizer', 'DIR')}, the directory of a chat model")
        separator = "\n\n" if self.is_instruction else ""
        return to_json({"messages": [{**message, "content": joined(message) + separator * (message["role"] == "user")}
                                     for message in self.messages]})


class Pair:
    """A preference pair: two Conversations, `chosen` and `rejected`, that begin with the messages of one prompt. Only
    the responses have loss tokens. len() counts the prompt twice, as it is in the tokens."""
    kind = "pairs"

    def __init__(self, where, record):
        prompt, responses = prompt_and_responses(where, record)
        if record.get("system"):
            prompt = [{"role": "system", "content": string_of(where, "system", record["system"])}, *prompt]
        more = of_template(where, record)
        self.sides = [Conversation(f"{where}: {name}", prompt + response, len(prompt), more)
                      for name, response in zip(RESPONSES, responses)]
        for name, side in zip(RESPONSES, self.sides):
            if not side.learns():
                raise DataError(f"{where}: the {name} response is empty; remove the pair")
        self.texts = [text for side in self.sides for text in side.texts]
        self.json = b"\n".join(side.json for side in self.sides)

    def __len__(self):
        return sum(map(len, self.sides))

    def encoded(self, has_template):
        """What Encoder.encode() takes, of each side."""
        return [side.encoded(has_template) for side in self.sides]


def to_json(value):
    return utf8(json.dumps(value, ensure_ascii=False, allow_nan=False))


def strings(value):
    """The texts in a value of JSON, as add_texts() of data/conversation_json.cpp finds them. Raises ValueError for a
    number that does not arrive as it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        skipped = (*LABELS, *REASONING[1:]) if REASONING[0] in value else LABELS
        for key, item in value.items():
            if key not in skipped:
                yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)
    elif isinstance(value, int) and not -1 << 63 <= value < 1 << 63:
        raise ValueError(f"{value} has more than 64 bits")


def joined(message):
    """The content of a message as a text."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def messages_of_row(where, record, shape):
    """The messages of a row, and how many of them at the beginning are inputs only, assistant turns among them."""
    if len(shape) == 1:
        messages = messages_of(where, *shape, record)
        if "system" in fields_of(shape) and record.get("system"):
            messages.insert(0, {"role": "system", "content": string_of(where, "system", record["system"])})
        return messages, 0
    sides = []
    for name, role in zip(shape, ("user", "assistant")):
        is_list = isinstance(record[name], list)
        sides.append(messages_of(where, name, record) if is_list else
                     [{"role": role, "content": string_of(where, name, record[name])}])
    if "input" in fields_of(shape) and record.get("input"):
        sides[0][-1]["content"] += "\n\n" + string_of(where, "input", record["input"])
    return sides[0] + sides[1], len(sides[0])


def prompt_and_responses(where, record):
    """The messages of a pair's prompt, and those of its two responses. The prompt is a field of its own, or what both
    conversations begin with, or both."""
    given, sides = record.get("prompt"), [side_of_pair(where, name, record) for name in RESPONSES]
    compared = [without_weights(side) for side in sides]
    if compared[0] == compared[1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are equal; remove the pair")
    if isinstance(given, list) or given is None:
        prompt = messages_of(f"{where}: prompt", "prompt", record) if given else []
        start = without_weights(prompt)
        is_repeated = all(side[:len(start)] == start for side in compared)
    else:
        prompt = [{"role": "user", "content": string_of(where, "prompt", given)}]
        is_repeated = all(side and side[0]["role"] != "assistant" for side in compared)
    if is_repeated:
        shared = common_prefix(*compared)
        prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
    for name, side in zip(RESPONSES, sides):
        if side and side[0]["role"] != "assistant":
            raise DataError(f"{where}: the pair has no shared prompt: '{name}' goes on with a turn of the role "
                            f"'{side[0]['role']}', not with an assistant turn; remove the pair")
    users = [joined(message) for message in prompt if message["role"] == "user"]
    if not any(users):
        raise DataError(f"{where}: the pair has no shared prompt: 'chosen' and 'rejected' need a user turn before them"
                        "; give 'prompt', or conversations that begin alike")
    if isinstance(given, str) and given.strip() not in map(str.strip, users):
        raise DataError(f"{where}: 'prompt' is none of the user turns that 'chosen' and 'rejected' begin with; correct "
                        "it, or leave it out")
    return prompt, sides


def side_of_pair(where, name, record):
    """The messages of a response, with the prompt if the row has them so."""
    if isinstance(record[name], list):
        return messages_of(f"{where}: {name}", name, record)
    content = string_of(where, name, record[name])
    if record.get("prompt") is None:
        raise DataError(f"{where}: the pair has no shared prompt: '{name}' is a string; give 'prompt', or lists of "
                        "messages that begin with the prompt")
    return [{"role": "assistant", "content": content}]


def without_weights(messages):
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def common_prefix(one, other):
    """The number of elements that two lists begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def messages_of(where, name, record):
    if not isinstance(record[name], list):
        raise DataError(f"{where}: '{name}' is not a list")
    return [message_of(f"{where}: message {number}", message) for number, message in enumerate(record[name], 1)]


def message_of(where, message):
    """A message as transformers gives it to a template: without keys that hold nothing, and reasoning by each of the
    names that templates read."""
    if not isinstance(message, dict):
        raise DataError(f"{where} holds {type(message).__name__}, not an object")
    roles = ROLES
    if "role" not in message and "from" in message:
        speaker, roles = message["from"], tuple(SPEAKERS)
        message = {"role": SPEAKERS[speaker] if speaker in roles else speaker, "content": message.get("value"),
                   **{key: value for key, value in message.items() if key not in ("from", "value")}}
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in roles:
        raise DataError(f"{where} has the role {message.get('role')!r}; give {', '.join(roles)}")
    content, calls = message.get("content"), any(map(message.get, RESPONSE[1:]))
    if isinstance(content, list):
        for part in content:
            check_part(where, part)
    elif not isinstance(content, str) and not (content is None and calls and message["role"] == "assistant"):
        raise DataError(f"{where} has no 'content' that is a string or a list of parts of text")
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def is_input(where, message, of_prompt):
    """Whether a message has no loss tokens: one of the prompt, or an assistant turn of weight 0, as OpenAI and Mistral
    write it. The weight is no part of what a template sees."""
    weight = message.pop("weight", 1) if message["role"] == "assistant" else 1
    if weight not in (0, 1):
        raise DataError(f"{where} has the weight {weight!r}; give 1, or 0 for a turn without loss tokens")
    return of_prompt or not weight


def check_part(where, part):
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where} has a part of the type {kind!r}; a language model reads text: "
                        '{"type": "text", "text": "…"}')


def of_template(where, record):
    """What a row has for a template besides messages."""
    more = {}
    for name in OF_TEMPLATE:
        value = record.get(name)
        if isinstance(value, str) and value:  # Arrow has no type for lists of unlike objects, so data sets write JSON
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as e:
                raise DataError(f"{where}: '{name}' is a string that is not JSON ({first_line(e)})") from None
        if value is None or value == "":
            continue
        if name == VARIABLES:
            taken = {"messages", "add_generation_prompt", *LISTS} & set(typed(where, name, value, dict, "an object"))
            if taken:
                raise DataError(f"{where}: '{name}' sets '{min(taken)}', which is a field of its own; leave it out")
        else:
            for item in typed(where, name, value, list, "a list of objects"):
                typed(where, name, item, dict, "objects")
        more[name] = value
    return more
