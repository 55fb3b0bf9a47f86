"""The encoding of a text by evidence: what decodes it into words that look like a language.

Each language lists its letters from the most to the least frequent; the share of the r-th of n is
taken as (ln(n + 1) - ln r) / n, which fits the alphabets of most languages (Gusein-Zade 1988).
"""

import itertools
import math
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

SAMPLE = 4000  # characters of words that are looked at
# Bits of what the lists do not tell, as estimates: only their order matters much.
FOREIGN, PUNCTUATION, SYMBOL, CONTROL = 13.0, 7.0, 15.0, 24.0
CAPITAL, CAPITALS = 4.0, 1.0  # the first of a word, and those after another
# A capital after a small letter, or a letter after a final one or beside one of another script.
MISPLACED = 10.0
UNUSUAL = 0.1  # for each encoding before it in the table
LISTED = 0.7  # bits above its share in the list, as a text has more than the letters of a list
COMMON_BITS, RARE_BITS = 12.5, 17.0  # of ideographs and syllables that are not listed
MAX_BITS = 12.0  # of a character above ASCII, on average, in what looks like a language
MARKS = frozenset(
    "«»“”„‘’‚‹›–—…•·€£§©®™°№¿¡\xa0、。，．！？；：（）「」『』《》【】・～ー\u3000،؟؛־׳״"
)
FINAL = frozenset("ςםןךץף")  # letters at the end of a word only
WORDS = re.compile(r"\S{0,40}[^\x00-\x7f]\S{0,40}")

LATIN = {
    "en": "etaoinshrdlcumwfgypbvkjxqzéñïç",
    "de": "enisratdhulcgmobwfkzüväpßjöyxqé",
    "fr": "esaitnruolédcpmvqfbghjàxèêyzçôùîâûwkœïëüæ",
    "es": "eaosrnidlctumpbgóvyqhífzájéñxúüwk",
    "pt": "aeosrindmutclpvgãhqbfzçáéíjóxêúâõôàkwy",
    "it": "eaionltrscdupmvghfbqzòàùèéìkjwxy",
    "sv": "eantrsildomkgväfhupåöbcyjxwzéq",
    "da": "erntidaslogmkfvubhpåyøæjcwzxéq",
    "fi": "aintesloukämvrjhypdögbcfwåzxq",
    "is": "arnieðstulgmkfhvoáþíjdöyébæóúýxp",
}
CENTRAL = {
    "pl": "aieonzrwsctykdpmułjlbgęąhżśóćfńźqvx",
    "cs": "oeantivlsrdkumpíchzáyjběřéčžýšůgfúňxťóďwq",
    "hu": "eatlnskázorgimédybvhjuöfpóőcíüúűxwqy",
    "ro": "eiarntulcsodăpmîșşțţfvbgâzhjxkwyq",
    "hr": "aieonrjtsuvkdmlpgzbčchšžćđf",
}
BALTIC = {
    "lt": "iasteournkmlpdvgėjbyųšžąčįcūęzfh",
    "lv": "aisternuomkldpāvzgībjēcšfņļžūhčķģ",
    "et": "aeistlumnkrdovgpjhäõübfcöšzž",
}
CYRILLIC = {
    "ru": "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё",
    "uk": "оаинвітерсклудмпзяьбгчйхжїюцшщєфґ'",
    "bg": "аиоентрсвлкдпмзгбуъячйцжщшхюфь",
    "sr": "аоиенрстјувдкмплгзбчшћцжхњљђфџ",
    "be": "анірыеосяктлвдпмуцбзьгшўэчхйюжёф'",
}
GREEK = {"el": "αοιετσνρηυκπςμλωίόάτγέδθήύώφχβξζψϊϋΐΰ"}
TURKISH = {"tr": "aeinrlıkdmytusboüşzgçğvhcöpfj" + "âî"}
HEBREW = {"he": "יוהלאתרבשמםנקדחפעכגטסןזצךףץ"}
ARABIC = {"ar": "اليمنوتربةعدسفهكقحجشطصخضىذأثزغظئءؤإآ", "fa": "اینردهوتمبسشكلزيفگعخقحجآپصطچضغذثظژ"}
VIETNAMESE = {"vi": "nhtcigaoumlrđysêôbưvâpdkơqăxe\u0301\u0300\u0323\u0309\u0303"}
THAI = {"th": "านรอกเง่มยลว้ดทส\u0e31ตะปบคห\u0e34แ\u0e35จพชขใไ\u0e37\u0e38โผ\u0e39\u0e4cธณถซศภฟญษฉ"}
# Characters in about the order of their frequency, and the encoding whose part for those in common
# use has the others.
CHINESE = {
    "zh": "的一是不了在人有我他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学"
    "对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已"
    "老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部正名定女问力机给等"
    "几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太"
    "水万市眼体别处总才场师书比住员九笑性通目华报立马命张活难神数件安表原车白应路期叫死常提感金何更反合放做"
    "系计或司利受光王果亲界及今京务制解各任至清物台象记边共风战干接它许八特觉望直服毛林题建南度统色字请交爱"
    "让认算论百吃义科怎元社术结六功指思非流每青管夫连远资队跟带花快条院变联言权往展该领传近留红治决周保达办"
    "运武半候七必城父强步完革深区即求品士转量空甚众技轻程告江语英基派满式李息写呢识极令黄德收脸钱党倒未持取"
    "设始版双历越史商千片容研像找友孩站广改议形委早房音火际则首单据导影失拿网香似斯专石若兵弟谁校读志飞观争"
    "究包组造落视济喜离虽坏界语模型训练世界，。",
}
TAIWANESE = {
    "zh-Hant": "的一是不了在人有我他這中大來上國個到說們為子和你地出道也時年得就那要下以生會自著去之過家學"
    "對可她里裡後小麼心多天而能好都然沒日於起還發成事只作當想看文無開手十用主行方又如前所本見經頭面公同三已"
    "老從動兩長知民樣現分將外但身些與高意進把法此實回二理美點月明其種聲全工己話兒者向情部正名定女問力機給等"
    "幾很業最間新什打便位因重被走電四第門相次東政海口使教西再平真聽世氣信北少關並內加化由卻代軍產入先山五太"
    "水萬市眼體別處總才場師書比住員九笑性通目華報立馬命張活難神數件安表原車白應路期叫死常提感金何更反合放做"
    "系計或司利受光王果親界及今京務制解各任至清物臺象記邊共風戰乾接它許八特覺望直服毛林題建南度統色字請交愛"
    "讓認算論百吃義科怎元社術結六功指思非流每青管夫連遠資隊跟帶花快條院變聯言權往展該領傳近留紅治決周保達辦",
}
JAPANESE = {
    "ja": "のいにをとはるしたがてでなっれこまりかもさうすらくんきけだあそつよどせえーわ、。めみやおンスル"
    "トリイちじラアクッドばシレジひねタフろごマロ日べプテ人一びぐコぶイカ大メ国年ナ本ムげ中サ出バ時キ会グ生オ"
    "ニ行ほデウパ見事者ふ分上ビダチブ十ミ何へむ学ェ前言気手ぎづゆずハエセ方今自間思社同地場モ者的ポャ部合物後"
    "ヒネョケズュ二小高私書来食子下長話東京語知家新電車入立名当体動女男月目水道天外明先使用意心作文度所世三",
}
KOREAN = {
    "ko": "이다는에의을가고하은지로한기리도사를들어나자서시대인그라아니으해있스게수정만일구부오보제장"
    "여주전상과조우원마공은안경신동비소무생국연선성실문유모화방미했세적교발음면물내말드저개중회관된학요분거위없지"
    "간치용래때러두트명바계르야최레산것강프집당재반심진양데속통와단행민영역타까노업표남날열히차월작습길터식결피외"
    "울현각군살름직파포북달건년본루벌임감설먹불너같운합니까크카타권목체청침술금더변눈람녀",
}
EVERY = {
    **LATIN, **CENTRAL, **BALTIC, **CYRILLIC, **GREEK, **TURKISH, **HEBREW, **ARABIC,
    **CHINESE, **TAIWANESE, **JAPANESE, **KOREAN, **VIETNAMESE, **THAI,
}  # fmt: skip
# The names are those that both Python and iconv know; of equal readings the first is taken.
ENCODINGS = {
    "ISO-8859-1": LATIN,
    "Windows-1252": LATIN,
    "Windows-1251": CYRILLIC,
    "GB18030": CHINESE,
    "SHIFT_JIS": JAPANESE,
    "CP932": JAPANESE,
    "EUC-JP": JAPANESE,
    "EUC-KR": KOREAN,
    "CP949": KOREAN,
    "BIG5": TAIWANESE,
    "KOI8-R": CYRILLIC,
    "KOI8-U": CYRILLIC,
    "Windows-1250": CENTRAL,
    "ISO-8859-2": CENTRAL,
    "Windows-1253": GREEK,
    "ISO-8859-7": GREEK,
    "Windows-1254": TURKISH,
    "Windows-1255": HEBREW,
    "Windows-1256": ARABIC,
    "Windows-1257": BALTIC,
    "CP866": CYRILLIC,
    "Windows-1258": VIETNAMESE,
    "TIS-620": THAI,
    "ISO-8859-5": CYRILLIC,
    "ISO-8859-6": ARABIC,
}
UTF16 = {"UTF-16LE": EVERY, "UTF-16BE": EVERY}
# The rows of an encoding with what is in common use, by the first byte of a character.
COMMON_ROWS = {
    "zh": ("gb2312", 0xB0, 0xD7),
    "zh-Hant": ("big5", 0xA4, 0xC6),
    "ja": ("shift_jis", 0x88, 0x97),
    "ko": ("euc_kr", 0xB0, 0xC8),
}


class Evidence(NamedTuple):
    """The surprise of a text as one in a language, by the frequencies of its letters."""

    bits: float  # of all words with a character above ASCII: the fewer, the more likely
    each: float  # bits of a character that is evidence


def most_likely(data: bytes, encodings: dict[str, dict[str, str]]) -> str | None:
    """-> the encoding in which a text looks most like a language; None if it does in none."""
    bits: dict[str, float] = {}
    for place, (name, languages) in enumerate(encodings.items()):
        found = _evidence(data, name, languages)
        if found and found.each <= MAX_BITS:
            bits[name] = found.bits + place * UNUSUAL
    return min(bits, key=bits.__getitem__, default=None)


def _evidence(data: bytes, encoding: str, languages: dict[str, str]) -> Evidence | None:
    """Returns that of the language that the text is most like; None if it does not decode."""
    width = 2 if encoding in UTF16 else 1
    for cut in range(4):  # the last character may be cut
        try:
            text = data[: len(data) // width * width - cut].decode(encoding)
            break
        except UnicodeDecodeError as error:
            if error.start < len(data) - 4:
                return None
    else:
        return None
    sample = " " + "  ".join(_words(text))
    pairs = Counter(itertools.pairwise(sample))
    count = sum(n for (_, c), n in pairs.items() if _is_evidence(c))
    # A letter alone is of any alphabet, and any two bytes without a zero are an ideograph.
    if count < (4 if languages is EVERY and 0 not in data else 1 if languages is LATIN else 2):
        return None
    bits, above = min(_bits(pairs, language, letters) for language, letters in languages.items())
    return Evidence(bits, above / count)


def _words(text: str) -> list[str]:
    """Returns the first words with a character above ASCII."""
    words, length = [], 0
    for found in WORDS.finditer(text):
        words.append(found[0])
        length += len(words[-1])
        if length > SAMPLE:
            break
    return words


def _bits(pairs: "Counter[tuple[str, str]]", language: str, letters: str) -> tuple[float, float]:
    """Returns the bits of characters, each after another, and those of the evidence among them."""
    shares = _shares(letters)
    total = above = 0.0
    for (before, c), n in pairs.items():
        bits = _cost(before, c, language, shares)
        if before.isalpha() and c.isalpha() and language not in COMMON_ROWS:
            bits += MISPLACED * (before in FINAL or _is_latin(before) != _is_latin(c))
        total += n * bits
        above += n * bits if _is_evidence(c) else 0.0
    return total, above


def _is_evidence(c: str) -> bool:
    return c > "~" or (c < " " and not c.isspace())


def _is_latin(c: str) -> bool:
    return c < "\u0250" or "\u1e00" <= c < "\u1f00"


@cache
def _shares(letters: str) -> dict[str, float]:
    """Returns the bits of each letter of a list."""
    n = len(letters)
    return {
        c: min(LISTED - math.log2((math.log(n + 1) - math.log(r)) / n), COMMON_BITS - 1)
        for r, c in enumerate(letters, 1)
    }


def _cost(before: str, c: str, language: str, shares: dict[str, float]) -> float:
    """Returns the bits of a character after another."""
    if c in shares:
        return shares[c]
    if c.isspace() and c <= " ":
        return 2.0
    small = "i" if c == "İ" else c.lower()
    if small != c and small in shares:
        if before.isupper():
            return shares[small] + CAPITALS
        return shares[small] + CAPITAL + (MISPLACED if before.islower() else 0.0)
    if c <= "\x7f":
        return PUNCTUATION if c.isprintable() else CONTROL
    if language in COMMON_ROWS and c.isalpha():
        return _ideograph(c, *COMMON_ROWS[language])
    if c in MARKS:
        return PUNCTUATION
    if c.isalpha():
        return FOREIGN
    return SYMBOL if c.isprintable() else CONTROL


@cache
def _ideograph(c: str, encoding: str, first: int, last: int) -> float:
    row = c.encode(encoding, "ignore")[:1]
    if not row:
        return SYMBOL + 5
    return COMMON_BITS if first <= row[0] <= last else RARE_BITS
