"""Chats of people and assistants, written as their programs export them."""

import io
import json
import zipfile

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.runs.source import read_source
from tests.corpus.reading import conversations, documents, lines, refused, skipped, written
from tests.programs import refuses

HI, SEE = ("user", "hi"), ("assistant", "see x.org")


def telegram(*messages, name="Ann"):
    return {"name": name, "type": "personal_chat", "id": 1, "messages": list(messages)}


def sent(number, who, text, seconds=None, **more):
    times = {} if seconds is None else {"date_unixtime": str(seconds)}
    identity = {"id": number, "type": "message", **times, "from": who, "from_id": f"user{who}"}
    return {**identity, "text": text, "text_entities": [], **more}


LINK = ["see ", {"type": "link", "text": "x.org"}]
SERVICE = {"id": 3, "type": "service", "actor": "Me", "action": "phone_call", "text": ""}
ONE = telegram(sent(1, "Ann", "hi"), sent(2, "Me", LINK), SERVICE)


def discord(who, text, time, kind="Default"):
    author = {
        "id": f"1{who}",
        "name": who,
        "discriminator": "0000",
        "nickname": who,
        "isBot": False,
    }
    return {"id": "9", "type": kind, "timestamp": time, "isPinned": False, "content": text} | {
        "author": author,
        "attachments": [],
        "embeds": [],
        "reactions": [],
    }


DISCORD = {
    "guild": {"id": "0", "name": "Direct Messages"},
    "channel": {"id": "2", "type": "DirectTextChat", "name": "Ann", "topic": None},
    "dateRange": {"after": None, "before": None},
    "messages": [
        discord("Me", "Joined the server.", "2024-01-01T09:00:00.1+00:00", "GuildMemberJoin"),
        discord("Ann", "hi", "2024-01-01T10:00:00.123+00:00"),
        discord("Me", "see x.org", "2024-01-01T10:01:00+00:00", "Reply"),
        discord("Me", "Started a call that lasted 3 minutes.", "2024-01-01T10:02:00+00:00", "Call"),
    ],
    "messageCount": 4,
}


def meta(who, text, ms, **more):
    content = {} if text is None else {"content": text.encode().decode("latin-1")}
    name = who.encode().decode("latin-1")
    return {"sender_name": name, "timestamp_ms": ms, **content, **more} | {
        "is_geoblocked_for_viewer": False
    }


MESSENGER = {  # the last message first
    "participants": [{"name": "Zo\u00c3\u00ab"}, {"name": "Me"}],
    "messages": [
        meta("Me", None, 1_700_000_090_000, photos=[{"uri": "a.jpg", "creation_timestamp": 1}]),
        meta("Zoë", "Reacted 😂 to your message ", 1_700_000_080_000),
        meta("Zoë", "Zoë called you.", 1_700_000_070_000, call_duration=12),
        meta("Me", "see x.org", 1_700_000_060_000),
        meta("Zoë", "né 😂", 1_700_000_000_000),
    ],
    "title": "Zo\u00c3\u00ab",
    "is_still_participant": True,
    "thread_path": "inbox/zoe_1",
    "magic_words": [],
}
ENCRYPTED = {
    "participants": ["Zoë", "Me"],
    "threadName": "Zoë_1",
    "messages": [
        {
            "isUnsent": False,
            "media": [],
            "reactions": [],
            "senderName": who,
            "text": text,
            "timestamp": 1_700_000_000_000 + i,
            "type": kind,
        }
        for i, (who, text, kind) in enumerate(
            [("Zoë", "né 😂", "text"), ("Zoë", "", "media"), ("Me", "see x.org", "text")]
        )
    ],
}


def node(key, parent, role, *texts, kind="text", **more):
    content = {"content_type": kind, "parts": list(texts)}
    message = {"id": key, "author": {"role": role, "name": None, "metadata": {}}, "weight": 1.0}
    message |= {
        "create_time": 1_700_000_000.5,
        "content": content,
        "recipient": "all",
        "metadata": {},
    }
    return key, {"id": key, "message": message | more, "parent": parent, "children": []}


HIDDEN = {"metadata": {"is_visually_hidden_from_conversation": True}}
CHATGPT = {
    "title": "Hi",
    "create_time": 1_700_000_000.5,
    "mapping": {
        "root": {"id": "root", "message": None, "parent": None, "children": ["s"]},
        **dict(
            [
                node("s", "root", "system", "", **HIDDEN),
                node("c", "s", "user", "about me", kind="user_editable_context", **HIDDEN),
                node("q", "c", "user", {"content_type": "image_asset_pointer"}, "hi"),
                node("old", "q", "assistant", "regenerated"),
                node("call", "q", "assistant", "search()", recipient="browser"),
                node("tool", "call", "tool", "results"),
                node("a", "tool", "assistant", "see x.org\ue200cite\ue202turn0search0\ue201"),
            ]
        ),
    },
    "current_node": "a",
    "conversation_id": "1",
}
CHATGPT["mapping"]["q"]["message"]["content"]["content_type"] = "multimodal_text"


def claude(key, sender, parent, text, **more):
    parts = [{"type": "thinking", "thinking": "..."}, {"type": "text", "text": text}]
    fields = {"uuid": key, "text": "a block is not supported", "content": parts, "sender": sender}
    times = {"created_at": "2024-01-01T10:00:00.123456Z", "attachments": [], "files": []}
    return fields | times | {"parent_message_uuid": parent} | more


NOBODY = "00000000-0000-4000-8000-000000000000"
CLAUDE = [
    {"uuid": "0", "name": "", "account": {"uuid": "1"}, "chat_messages": []},
    {
        "uuid": "1",
        "name": "Hi",
        "chat_messages": [
            claude("a", "human", NOBODY, "hi"),
            claude("b", "assistant", "a", "regenerated"),
            claude("c", "assistant", "a", "see x.org"),
        ],
    },
]


def signal(date, who, text, **more):
    """A line of the data.json of signal-export."""
    empty = {"quote": "", "sticker": None, "reactions": [], "attachments": [], "deleted": False}
    return {"date": date, "sender": who, "body": text} | empty | more


SIGNAL = [
    signal("2024-01-01T10:00:00", "Ann", "hi"),
    signal("2024-01-01T10:00:30", "Me", "", deleted=True),
    signal("2024-01-01T10:01:00", "Me", "see x.org"),
]


def google(who, time, **more):
    creator = {"name": who, "email": f"{who}@x.org", "user_type": "Human"}
    return {"creator": creator, "created_date": time, "topic_id": "t", "message_id": "m"} | more


GOOGLE = {  # messages.json of Google Takeout
    "messages": [
        google("Ann", "Thursday, December 31, 2020 at 11:59:59\u202fPM UTC", text="hi"),
        google("Me", "Friday, January 1, 2021 at 12:01:00\u202fAM UTC", text="see x.org"),
        google("Ann", "Friday, January 1, 2021 at 12:02:00\u202fAM UTC", attached_files=[{}]),
        google("Ann", "Friday, January 1, 2021 at 9:00:00\u202fAM UTC", text="hi"),
        google("Me", "Friday, January 1, 2021 at 9:01:00\u202fAM UTC", text="see x.org"),
    ]
}


def webui(key, parent, role, text):
    own = {"id": key, "parentId": parent, "childrenIds": [], "role": role, "content": text}
    return key, {**own, "timestamp": 1_700_000_000}


WEBUI = [
    {
        "id": "1",
        "title": "Hi",
        "chat": {
            "models": ["m"],
            "history": {
                "messages": dict(
                    [
                        webui("q", None, "user", "hi"),
                        webui(
                            "a",
                            "q",
                            "assistant",
                            '<details type="reasoning" done="true">\n<summary>Thought</summary>\n'
                            "> Hm.\n</details>\nsee x.org",
                        ),
                        webui("b", "q", "assistant", "regenerated"),
                    ]
                ),
                "currentId": "a",
            },
        },
    }
]

EXPORTS = {
    "signal": (SIGNAL, "Me", [[HI, SEE]]),
    "google chat": (GOOGLE, "Me", [[HI, SEE], [HI, SEE]]),
    "open-webui": (WEBUI, None, [[HI, SEE]]),
    "telegram": (ONE, "Me", [[HI, SEE]]),
    "all of telegram": (
        {"about": "...", "chats": {"about": "", "list": [telegram(name=None), ONE]}},
        "Me",
        [[HI, SEE]],
    ),
    "discord": (DISCORD, "Me", [[HI, SEE]]),
    "messenger": (MESSENGER, "Me", [[("user", "né 😂"), SEE]]),
    "its other side": (
        {**MESSENGER, "messages": MESSENGER["messages"] + [meta("Me", "hi", 1_699_999_999_000)]},
        "zoë",
        [[HI, ("assistant", "né 😂"), ("user", "see x.org")]],
    ),
    "encrypted": (ENCRYPTED, "Me", [[("user", "né 😂"), SEE]]),
    "chatgpt": ([CHATGPT], None, [[HI, SEE]]),
    "claude": (CLAUDE, None, [[HI, SEE]]),
    "claude, earlier": (
        [
            {
                "uuid": "1",
                "chat_messages": [
                    {"uuid": "a", "text": "hi", "sender": "human"},
                    {"uuid": "b", "text": "see x.org", "sender": "assistant"},
                ],
            }
        ],
        None,
        [[HI, SEE]],
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_read(name, tmp_path):
    value, assistant, expected = EXPORTS[name]
    path = written(tmp_path / "export.json", json.dumps(value, indent=1))
    assert conversations(Corpus(path, assistant=assistant)) == expected
    assert Corpus(path, assistant=assistant).has_conversations()
    if assistant:
        assert "--assistant" in refused(path)


# WhatsApp: the first line, and how the lines of messages begin

PLAIN = [("user", "hi\nthere: you"), ("assistant", "ho")], [("user", "hi"), ("assistant", "ho")]
STAMPS = {
    "android, 12 hours": "12/31/20, 11:59 PM - |1/1/21, 12:01 AM - |1/2/21, 8:02 AM - ",
    "since 2023": "12/31/20, 11:59\u202fPM - |1/1/21, 12:01\u202fAM - |1/2/21, 8:02\u202fAM - ",
    "android, 24 hours": "31/12/2020, 23:59 - |01/01/2021, 00:01 - |02/01/2021, 08:02 - ",
    "german": "31.12.20, 23:59 - |01.01.21, 00:01 - |02.01.21, 08:02 - ",
    "french": "31/12/2020 à 23:59 - |01/01/2021 à 00:01 - |02/01/2021 à 08:02 - ",
    "spanish": "31/12/20 11:59 p.\xa0m. - |1/1/21 12:01 a.\xa0m. - |2/1/21 8:02 a.\xa0m. - ",
    "swedish": "2020-12-31 23:59 - |2021-01-01 00:01 - |2021-01-02 08:02 - ",
    "chinese": "2020/12/31 下午11:59 - |2021/1/1 上午12:01 - |2021/1/2 上午8:02 - ",
    "finnish": "31.12.2020 klo 23.59 - |1.1.2021 klo 0.01 - |2.1.2021 klo 8.02 - ",
    "hungarian": "2020. 12. 31. 23:59 - |2021. 01. 01. 0:01 - |2021. 01. 02. 8:02 - ",
    "korean": "2020. 12. 31. 오후 11:59 - |2021. 1. 1. 오전 12:01 - |2021. 1. 2. 오전 8:02 - ",
    "greek": "31/12/20, 11:59 μ.μ. - |1/1/21, 12:01 π.μ. - |2/1/21, 8:02 π.μ. - ",
    "turkish": "31.12.2020 ÖS 11:59 - |1.01.2021 ÖÖ 12:01 - |2.01.2021 ÖÖ 8:02 - ",
    "hindi": "31/12/20, 11:59 अपराह्न - |01/01/21, 12:01 पूर्वाह्न - |02/01/21, 8:02 पूर्वाह्न - ",
    "arabic": (
        "\u200f31\u200f/12\u200f/2020، 11:59 م - |\u200f1\u200f/1\u200f/2021، 12:01 ص - "
        "|\u200f2\u200f/1\u200f/2021، 8:02 ص - "
    ),
    "vietnamese": "23:59, 31/12/2020 - |00:01, 01/01/2021 - |08:02, 02/01/2021 - ",
    "copied from the page": "[23:59, 31/12/2020] |[00:01, 01/01/2021] |[08:02, 02/01/2021] ",
    "copied in the US": "[11:59 PM, 12/31/2020] |[12:01 AM, 1/1/2021] |[8:02 AM, 1/2/2021] ",
    "ios": "[31/12/2020, 23:59:59] |[01/01/2021, 00:01:00] |[02/01/2021, 08:02:00] ",
    "ios, 12 hours": "[12/31/20, 11:59:59 PM] |[1/1/21, 12:01:00 AM] |[1/2/21, 8:02:00 AM] ",
    "ios, swedish": "[2020-12-31 23:59:59] |[2021-01-01 00:01:00] |[2021-01-02 08:02:00] ",
}

for first in 0x660, 0x6F0:  # digits of Arabic and Persian
    STAMPS[f"{first:x}"] = STAMPS["arabic"].translate({48 + i: first + i for i in range(10)})


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", STAMPS)
def test_chats_of_whatsapp_are_read(name, end, tmp_path):
    first, second, third = STAMPS[name].split("|")
    mark = "\u200e" if "[" in first else ""
    service = "Ann: \u200eMessages and calls are end-to-end encrypted." if mark else "Code changed."
    omitted = "\u200eimage omitted" if mark else "<Media omitted>"
    lines = [
        f"{mark}{first}{service}",
        f"{first}Ann: hi",
        "there: you",
        f"{mark}{second}Me: {omitted}",
        f"{second}Me: ho {mark}<This message was edited>",
        f"{second}Me: This message was deleted",
        f"{third}~\u202fAnn: hi" if mark else f"{third}Ann: hi",
        f"{third}Me: ho",
    ]
    path = written(tmp_path / "chat.txt", end.join(lines) + end)
    assert conversations(Corpus(path, assistant="Me")) == list(map(list, PLAIN))
    assert "Ann (2 turns), Me (2 turns)" in refused(path)
    assert Corpus(path, assistant="Me").has_conversations()
    assert documents(Corpus(path, chat=False)) == ["\n".join(lines) + "\n"]


def test_a_chat_stays_in_order_where_its_times_are_not_understood(tmp_path):
    """Albanian has words of its own for the halves of a day."""
    stamps = "31.12.20, 11:58 e paradites - |31.12.20, 1:02 e pasdites - "
    first, second = stamps.split("|")
    lines = [f"{first}Ann: hi", f"{first}Me: one", f"{second}Ann: and?", f"{second}Me: two"]
    path = written(tmp_path / "chat.txt", "\n".join(lines))
    said = [("user", "hi"), ("assistant", "one"), ("user", "and?"), ("assistant", "two")]
    assert conversations(Corpus(path, assistant="Me")) == [said]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("IMG-20201231-WA0001.jpg (file attached)\nlook", "look"),
        ("\u200eIMG-20201231-WA0001.jpg (Datei angehängt)", None),
        ("look \u200e<attached: 00000001-PHOTO.jpg>", "look"),
        ("report.pdf • \u200e2 pages \u200edocument omitted", None),
        ("<Medien ausgeschlossen>", None),
        ("ask @\u2068Ann\u2069", "ask @Ann"),
        ("<b>bold</b>", "<b>bold</b>"),
        ("i <3 you", "i <3 you"),
    ],
)
def test_what_whatsapp_adds_is_left_out(text, said, tmp_path):
    lines = f"31.12.20, 23:59 - Ann: hi\n31.12.20, 23:59 - Me: {text}\n31.12.20, 23:59 - Me: ho\n"
    path = written(tmp_path / "a.txt", lines)
    answer = f"{said}\nho" if said else "ho"
    assert conversations(Corpus(path, assistant="Me")) == [[HI, ("assistant", answer)]]


@pytest.mark.parametrize(
    "text",
    [
        "2020-12-31 23:59:59,123 - root - INFO - start\n",
        "[2020-12-31 23:59:59] local.ERROR: failed\n",
        "1/2/2020 was a Wednesday. 10:30 - breakfast\n",
        "31.12.20, 23:59 - nobody speaks\n",
    ],
)
def test_logs_and_notes_are_texts(text, tmp_path):
    assert documents(written(tmp_path / "chat.txt", text)) == [text]


# Slack

USERS = [
    {"id": "U1", "name": "ann", "profile": {"display_name": "Ann", "real_name": "Ann Ash"}},
    {"id": "U2", "name": "me", "real_name": "Me Myself", "profile": {"display_name": ""}},
]


def slack(user, text, ts, **more):
    return {"client_msg_id": "1", "type": "message", "text": text, "user": user, "ts": ts, **more}


DAY = [
    {"type": "message", "subtype": "channel_join", "ts": "1577836700.000200", "user": "U1"}
    | {"text": "<@U1> has joined the channel"},
    slack("U1", "hi &amp; <!here>", "1577836800.000200", thread_ts="1577836800.000200"),
    slack("U1", "<https://x.org|a page> in <#C1|general>", "1577836801.000200"),
    slack("U2", "see <https://x.org>", "1577836802.000200"),
    slack("U2", "answered <@U1>, @all", "1577836803.000200", thread_ts="1577836800.000200"),
]
SLACK = {
    "channels.json": [{"id": "C1", "name": "general", "topic": {"value": "", "creator": ""}}],
    "general/2020-01-01.json": DAY,
    "users.json": USERS,
}
THREADS = [
    [("user", "a page in #general"), ("assistant", "see https://x.org")],
    [("user", "hi & @here"), ("assistant", "answered @Ann, @all")],
]


@pytest.mark.parametrize("is_zip", [False, True])
def test_days_of_slack_have_the_names_of_its_users(is_zip, tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, value in SLACK.items():
            archive.writestr(name, json.dumps(value))
            if not is_zip:
                written(tmp_path / "export" / name, json.dumps(value))
    export = written(tmp_path / "export.zip", packed.getvalue()) if is_zip else tmp_path / "export"
    assert sorted(conversations(Corpus(export, assistant="Me Myself"))) == THREADS
    assert "Me Myself (2 turns)" in refused(export) and "Ann (2 turns)" in refused(export)
    if not is_zip:
        alone = export / "general" / "2020-01-01.json"
        assert sorted(conversations(Corpus(alone, assistant="Me Myself"))) == THREADS
        (export / "users.json").unlink()
        found = sorted(conversations(Corpus(export, assistant="U2")))
        assert str(found).replace("@U1", "@Ann") == str(THREADS)


# All of them

HOUR = 3600


def test_neighbours_are_joined_and_a_pause_begins_a_conversation(tmp_path):
    messages = [
        sent(1, "Me", "anyone?", 0),
        sent(2, "Ann", "hi", 1),
        sent(3, "Bob", "ho", 2),
        sent(4, "Me", "one", 3),
        sent(5, "Me", "two", 4),
        sent(6, "Me", "", 5, photo="a.jpg"),
        sent(7, "Ann", "early", 8 * HOUR + 4),
        sent(8, None, "late", 16 * HOUR + 5),
        sent(9, "Me", "yes", 16 * HOUR + 6),
    ]
    texts = Corpus(
        written(tmp_path / "result.json", json.dumps(telegram(*messages))), assistant="Me"
    )
    assert conversations(texts) == [
        [("user", "hi\nho"), ("assistant", "one\ntwo"), ("user", "early")],
        [("user", "late"), ("assistant", "yes")],
    ]
    assert set(texts.report.notes) == {
        "read conversations from Telegram chats, with 'Me' as the assistant and a new "
        "conversation after 8 hours without a message, or 20 turns, in 1 file",
        "Not read: 1 message of a service or without text",
        "Not read: 1 message at the start, by the assistant",
    }


def test_without_the_assistant_the_speakers_are_listed(tmp_path):
    path = written(tmp_path / "result.json", json.dumps(ONE))
    words = refused(path)
    assert "is a Telegram chat" in words and "Ann (1 turn), Me (1 turn)" in words
    assert f"smallmind train {path} --assistant Ann" in words
    assert "without 'Bob' in it" in refused(path, assistant="Bob")
    assert conversations(Corpus(path, assistant=" me ")) == [[HI, SEE]]
    assert "leave out one of the two" in refused(path, assistant="Me", chat=False)
    written(tmp_path / "b.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"]
    assert skipped(texts, tmp_path)["result.json"].startswith("is a Telegram chat")
    texts = Corpus(tmp_path, assistant="Me")
    assert conversations(texts) == [[HI, SEE]]
    assert skipped(texts, tmp_path)["b.txt"].startswith("is not a chat")
    assert "has none; leave it out" in refused(tmp_path / "b.txt", assistant="Me")


def test_a_long_chat_without_a_pause_becomes_several_conversations(tmp_path):
    """All but the last have as many turns; each begins with a question."""
    said = [f"31.12.20, 23:{i:02} - {'AB'[i % 2]}: {i}" for i in range(59)]
    path = written(tmp_path / "chat.txt", "\n".join(said))
    found = conversations(Corpus(path, assistant="B"))
    assert [len(turns) for turns in found] == [20, 20, 19]
    assert [text for turns in found for _, text in turns] == [str(i) for i in range(59)]
    written(path, "\n".join(said[:41]))
    assert [len(turns) for turns in conversations(Corpus(path, assistant="B"))] == [20, 21]


def test_a_single_conversation_is_divided_before_questions(tmp_path):
    roles = ["system", *["user", "assistant"] * 3]
    turns = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
    source = read_source(written(tmp_path / "a.jsonl", lines({"messages": turns})))
    assert [[turn.text for turn in one] for one in source.conversations] == [
        ["0", "1", "2"],
        ["0", "3", "4"],
        ["0", "5", "6"],
    ]
    assert "Divided the only conversation into 3: the last of them is held out" in (
        source.report.notes
    )
    one = read_source(written(tmp_path / "b.jsonl", lines({"messages": turns[:3]})))
    refuses("there is only one conversation: training needs two", lambda: one.held_out)
