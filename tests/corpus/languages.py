"""Sentences in many languages, and the encodings in which people have them."""

# Language -> encodings, short texts, a long one.
TEXTS = {
    "Russian": (
        ["KOI8-R", "Windows-1251", "ISO-8859-5", "CP866", "UTF-16LE", "UTF-16BE"],
        ["Привет, мир!", "Меня зовут Анна.", "Глава первая", "Как дела? Всё хорошо.", "МОСКВА"],
        "Вчера вечером мы долго гуляли по берегу реки и разговаривали о том, куда поедем летом. "
        "Брат хотел в горы, сестра мечтала увидеть море, а я думал только о том, что скоро "
        "экзамены. Ёлки на другом берегу уже потемнели, и где-то далеко лаяла собака.\n",
    ),
    "Ukrainian": (
        ["KOI8-U", "Windows-1251", "UTF-16LE"],
        ["Привіт, як справи?", "Мене звати Олена, я живу у Києві.", "Її їжак їсть яблуко."],
        "Учора ввечері ми довго гуляли берегом річки й розмовляли про те, куди поїдемо влітку. "
        "Брат хотів у гори, сестра мріяла побачити море, а я думав лише про те, що скоро іспити. "
        "Її ґудзик загубився десь у траві, і ми шукали його аж до ночі.\n",
    ),
    "Chinese": (
        ["GB18030", "UTF-16LE", "UTF-16BE"],
        ["你好，世界！", "我是一个学生。", "今天天气很好", "第一章 春天", "谢谢你的帮助"],
        "昨天晚上我们沿着河边散步，谈论夏天要去哪里。哥哥想去山里，妹妹梦想着看大海，而我只想着快要考试了。"
        "对岸的树已经暗下来，远处有一只狗在叫。我们走了很久，才回到家里吃饭。\n",
    ),
    "Traditional Chinese": (
        ["BIG5"],
        ["你好，世界！我是學生。", "今天的天氣很好", "謝謝你的幫助"],
        "昨天晚上我們沿著河邊散步，談論夏天要去哪裡。哥哥想去山裡，妹妹夢想著看大海，而我只想著快要考試了。"
        "對岸的樹已經暗下來，遠處有一隻狗在叫。我們走了很久，才回到家裡吃飯。\n",
    ),
    "Japanese": (
        ["SHIFT_JIS", "EUC-JP", "UTF-16LE", "UTF-16BE"],
        [
            "こんにちは、世界。",
            "私は学生です。",
            "吾輩は猫である",
            "ありがとうございます",
            "コンピュータ",
        ],
        "昨日の夕方、私たちは川のそばを長いあいだ散歩しながら、夏にどこへ行くかを話しました。兄は山へ行きたがり、"
        "妹は海を見るのを夢みていましたが、私はもうすぐ試験だということばかり考えていました。\n",
    ),
    "Korean": (
        ["EUC-KR", "UTF-16LE"],
        ["안녕하세요, 세계!", "저는 학생입니다.", "오늘 날씨가 좋네요", "감사합니다", "제1장 봄"],
        "어제 저녁에 우리는 강가를 오래 걸으면서 여름에 어디로 갈지 이야기했다. 형은 산에 가고 싶어 했고, "
        "동생은 바다를 보는 것을 꿈꾸었지만, 나는 곧 시험이 있다는 생각만 하고 있었다.\n",
    ),
    "Polish": (
        ["Windows-1250", "ISO-8859-2"],
        ["Zażółć gęślą jaźń", "Cześć, jak się masz?", "Miło mi cię poznać, dziękuję.", "Łódź"],
        "Wczoraj wieczorem długo spacerowaliśmy brzegiem rzeki i rozmawialiśmy o tym, dokąd "
        "pojedziemy latem. Brat chciał w góry, siostra marzyła, żeby zobaczyć morze, a ja "
        "myślałem tylko o tym, że wkrótce są egzaminy. Gdzieś daleko szczekał pies.\n",
    ),
    "Greek": (
        ["Windows-1253", "ISO-8859-7", "UTF-16LE"],
        ["Γειά σου, κόσμε!", "Με λένε Άννα.", "Τι κάνεις σήμερα;", "ευχαριστώ"],
        "Χθες το βράδυ περπατήσαμε πολλή ώρα δίπλα στο ποτάμι και μιλούσαμε για το πού θα πάμε το "
        "καλοκαίρι. Ο αδελφός μου ήθελε βουνό, η αδελφή μου ονειρευόταν να δει τη θάλασσα, κι εγώ "
        "σκεφτόμουν μόνο ότι σε λίγο έχουμε εξετάσεις.\n",
    ),
    "Turkish": (
        ["Windows-1254"],
        ["Günaydın, nasılsınız?", "Benim adım Ayşe.", "İstanbul'da yaşıyorum.", "Teşekkür ederim"],
        "Dün akşam nehrin kıyısında uzun uzun yürüdük ve yazın nereye gideceğimizi konuştuk. "
        "Ağabeyim dağlara gitmek istiyordu, kız kardeşim denizi görmeyi düşlüyordu, bense yalnızca "
        "yaklaşan sınavları düşünüyordum. Uzakta bir köpek havlıyordu.\n",
    ),
    "Hebrew": (
        ["Windows-1255", "UTF-16LE"],
        ["שלום עולם!", "קוראים לי אנה.", "מה שלומך היום?", "תודה רבה"],
        "אתמול בערב הלכנו זמן רב לאורך הנהר ודיברנו על המקום שאליו ניסע בקיץ. אחי רצה להרים, אחותי "
        "חלמה לראות את הים, ואני חשבתי רק על כך שהבחינות מתקרבות.\n",
    ),
    "Arabic": (
        ["Windows-1256", "ISO-8859-6", "UTF-16LE"],
        ["مرحبا بالعالم!", "اسمي آنا.", "كيف حالك اليوم؟", "شكرا جزيلا"],
        "مشينا مساء أمس طويلا على ضفة النهر وتحدثنا عن المكان الذي سنذهب إليه في الصيف. كان أخي يريد "
        "الجبال، وكانت أختي تحلم برؤية البحر، أما أنا فلم أفكر إلا في الامتحانات القريبة.\n",
    ),
    "French": (
        ["ISO-8859-1", "Windows-1252"],
        [
            "Ça va très bien, merci.",
            "L'été dernier à la plage",
            "Où êtes-vous né ?",
            "C'est déjà noël.",
        ],
        "Hier soir, nous avons longtemps marché au bord de la rivière et nous avons parlé de "
        "l'endroit où nous irions cet été. Mon frère préférait la montagne, ma sœur rêvait de voir "
        "la mer, et moi, je ne pensais qu'à mes examens… « Ça ira », disait-elle.\n",
    ),
    "German": (
        ["ISO-8859-1", "Windows-1252"],
        ["Schöne Grüße aus München", "Ich heiße Jörg.", "Übung macht den Meister", "Straße"],
        "Gestern Abend gingen wir lange am Fluss spazieren und überlegten, wohin wir im Sommer "
        "fahren würden. Mein Bruder wollte in die Berge, meine Schwester träumte vom Meer, und ich "
        "dachte nur an die Prüfungen. „Es wird schön“, sagte sie, „für uns alle.“\n",
    ),
    "Spanish": (
        ["ISO-8859-1"],
        ["¿Cómo estás, señor?", "Mañana será otro día.", "El niño comió una piña"],
        "Ayer por la noche caminamos mucho tiempo junto al río y hablamos de adónde iríamos en "
        "verano. Mi hermano quería ir a la montaña, mi hermana soñaba con ver el mar, y yo sólo "
        "pensaba en que pronto habría exámenes.\n",
    ),
    "Czech": (
        ["Windows-1250", "ISO-8859-2"],
        ["Příliš žluťoučký kůň", "Dobrý den, jak se máte?", "Děkuji, mám se dobře."],
        "Včera večer jsme se dlouho procházeli podél řeky a povídali si o tom, kam pojedeme v létě. "
        "Bratr chtěl do hor, sestra snila o tom, že uvidí moře, a já myslel jen na to, že brzy "
        "budou zkoušky.\n",
    ),
    "Hungarian": (
        ["Windows-1250", "ISO-8859-2"],
        ["Jó napot kívánok, hogy van?", "Köszönöm szépen, jól vagyok.", "Őszinte nő a tűznél"],
        "Tegnap este sokáig sétáltunk a folyóparton, és arról beszélgettünk, hová utazunk nyáron. "
        "A bátyám a hegyekbe akart menni, a húgom arról álmodott, hogy látja a tengert, én pedig "
        "csak arra gondoltam, hogy nemsokára itt vannak a vizsgák.\n",
    ),
    "Lithuanian": (
        ["Windows-1257"],
        [
            "Labas rytas, kaip sekasi?".replace("Labas", "Gražus"),
            "Ačiū, viskas gerai, mano šuo čia.",
        ],
        "Vakar vakare ilgai vaikščiojome palei upę ir kalbėjomės, kur važiuosime vasarą. Brolis "
        "norėjo į kalnus, sesuo svajojo pamatyti jūrą, o aš galvojau tik apie tai, kad greitai "
        "bus egzaminai.\n",
    ),
    "Vietnamese": (
        ["Windows-1258"],
        [],
        "T\u00f4i s\u00f4\u0301ng \u01a1\u0309 Ha\u0300 N\u00f4\u0323i va\u0300 tho\u031bi".replace(
            "\u031b", ""
        )
        + " tie\u0301t h\u00f4m nay \u0111e\u0323p. Ba\u0323n co\u0301 kho\u0309e kh\u00f4ng?\n",
    ),
}

# No number of `smallmind.files.languages` was chosen by looking at these.
UNSEEN = {
    "Russian": (
        ["KOI8-R", "Windows-1251", "CP866"],
        [
            "Доброе утро",
            "Где находится вокзал?",
            "Я не понимаю",
            "Сколько это стоит?",
            "Война и мир",
            "Кошка спит на диване.",
            "Спасибо за помощь",
        ],
        "Старый учитель каждое утро выходил в сад, садился на скамейку и читал газету. Соседи здоровались с ним, а дети приносили яблоки. Однажды он не пришёл, и все очень удивились.",
    ),
    "Ukrainian": (
        ["KOI8-U", "Windows-1251"],
        [
            "Доброго ранку",
            "Де знаходиться вокзал?",
            "Я не розумію",
            "Скільки це коштує?",
            "Дякую за допомогу",
        ],
        "Старий учитель щоранку виходив у садок, сідав на лавку й читав газету. Сусіди віталися з ним, а діти приносили яблука. Одного разу він не прийшов, і всі дуже здивувалися.",
    ),
    "Chinese": (
        ["GB18030"],
        [
            "早上好",
            "火车站在哪里？",
            "我不明白",
            "这个多少钱？",
            "猫在沙发上睡觉。",
            "红楼梦",
            "中华人民共和国",
        ],
        "老教师每天早晨走进花园，坐在长椅上看报纸。邻居们向他问好，孩子们给他送苹果。有一天他没有来，大家都很惊讶。",
    ),
    "Japanese": (
        ["SHIFT_JIS", "EUC-JP"],
        [
            "おはよう",
            "駅はどこですか？",
            "わかりません",
            "これはいくらですか",
            "猫がソファーで寝ている。",
            "雪国",
            "東京都",
        ],
        "年老いた先生は毎朝庭に出て、ベンチに腰かけて新聞を読んでいた。近所の人たちはあいさつをし、子どもたちはりんごを持ってきた。ある日、先生は来なかったので、みんなとても驚いた。",
    ),
    "Korean": (
        ["EUC-KR"],
        [
            "좋은 아침",
            "역이 어디에 있어요?",
            "모르겠어요",
            "이거 얼마예요?",
            "고양이가 소파에서 자고 있다.",
            "서울",
        ],
        "늙은 선생님은 매일 아침 마당에 나와 의자에 앉아 신문을 읽었다. 이웃들은 인사를 했고 아이들은 사과를 가져왔다. 어느 날 선생님이 오지 않아서 모두 깜짝 놀랐다.",
    ),
    "Polish": (
        ["Windows-1250", "ISO-8859-2"],
        [
            "Dzień dobry",
            "Gdzie jest dworzec główny?",
            "Nie rozumiem, proszę powtórzyć",
            "Ile to kosztuje, złotówkę?",
            "Dziękuję za pomoc",
            "Kot śpi",
        ],
        "Stary nauczyciel każdego ranka wychodził do ogrodu, siadał na ławce i czytał gazetę. Sąsiedzi go pozdrawiali, a dzieci przynosiły jabłka. Pewnego dnia nie przyszedł i wszyscy bardzo się zdziwili.",
    ),
    "Greek": (
        ["Windows-1253", "ISO-8859-7"],
        [
            "Καλημέρα",
            "Πού είναι ο σταθμός;",
            "Δεν καταλαβαίνω",
            "Πόσο κάνει αυτό;",
            "Η γάτα κοιμάται",
        ],
        "Ο γέρος δάσκαλος έβγαινε κάθε πρωί στον κήπο, καθόταν στο παγκάκι και διάβαζε την εφημερίδα. Οι γείτονες τον χαιρετούσαν και τα παιδιά του έφερναν μήλα.",
    ),
    "Turkish": (
        ["Windows-1254"],
        [
            "İyi akşamlar",
            "İstasyon nerede acaba, şurada mı?",
            "Anlamıyorum",
            "Kaç lira ediyor?",
            "Yardımınız için sağ olun",
            "Kedi uyuyor",
        ],
        "Yaşlı öğretmen her sabah bahçeye çıkar, banka oturur ve gazetesini okurdu. Komşular ona selam verir, çocuklar elma getirirdi. Bir gün gelmedi ve herkes çok şaşırdı.",
    ),
    "Hebrew": (
        ["Windows-1255"],
        ["בוקר טוב", "איפה התחנה?", "אני לא מבין", "כמה זה עולה?", "החתול ישן על הספה"],
        "המורה הזקן יצא בכל בוקר לגינה, ישב על הספסל וקרא עיתון. השכנים בירכו אותו והילדים הביאו תפוחים.",
    ),
    "Arabic": (
        ["Windows-1256"],
        ["صباح الخير", "أين المحطة؟", "لا أفهم", "بكم هذا؟", "القطة تنام على الأريكة"],
        "كان المعلم العجوز يخرج كل صباح إلى الحديقة ويجلس على المقعد ويقرأ الجريدة. وكان الجيران يسلمون عليه والأطفال يحضرون له التفاح.",
    ),
    "French": (
        ["ISO-8859-1", "Windows-1252"],
        [
            "Où est la gare, s'il vous plaît ?",
            "Je ne comprends pas, répétez",
            "Le chat dort sur le canapé",
            "Merci pour votre aide précieuse",
            "À la recherche du temps perdu",
            "déjà",
        ],
        "Le vieux maître d'école sortait chaque matin dans le jardin, s'asseyait sur le banc et lisait le journal. Les voisins le saluaient, et les élèves lui apportaient des pommes. Un jour, il ne vint pas, et tous s'étonnèrent.",
    ),
    "German": (
        ["ISO-8859-1", "Windows-1252"],
        [
            "Wo ist der nächste Bahnhof?",
            "Ich verstehe Sie nicht, können Sie das wiederholen?",
            "Die Kätzchen schlafen, weiß ich",
            "Vielen Dank für Ihre Hilfe",
            "Größe",
            "Müller",
        ],
        "Der alte Lehrer ging jeden Morgen in den Garten, setzte sich auf die Bank und las die Zeitung. Die Nachbarn grüßten ihn, und die Kinder brachten Äpfel. Eines Tages kam er nicht, und alle wunderten sich sehr.",
    ),
}
